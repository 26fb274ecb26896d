-- burst_buffer/lua of Slurm: imports a dataset into the volume of the storage nodes before the job starts.
--
--     #DLFS stage_in source=/data/photos name=photos
--
-- slurmctld runs this file on its machine, as SlurmUser: copy it to the folder of slurm.conf. In slurm.conf:
-- BurstBufferType=burst_buffer/lua; in burst_buffer.conf: Directive=DLFS. So dlfs must be there, and reach sources and storage.
-- A source must lie under SOURCES, a folder whose files every user may read. A dataset that exists stays as it is.
local VOLUME = os.getenv("DLFS_VOLUME") or "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12"
local SOURCES = os.getenv("DLFS_SOURCES") or "/data/"
local DLFS = os.getenv("DLFS_PROGRAM") or "/opt/dlfs/bin/dlfs"

-- Returns source and name that a job's script asks for, or nil and what is wrong with them; nil alone if it asks for nothing.
local function find_order(script)
    local file = io.open(script, "r")
    if not file then return nil, "cannot read " .. script end
    local words
    for line in file:lines() do
        words = words or line:match("^#DLFS%s+stage_in%s+(.*)$")
    end
    file:close()
    if not words then return nil end
    local source, name = words:match("source=(%S+)"), words:match("name=(%S+)")
    if not source or not name then return nil, "expected '#DLFS stage_in source=PATH name=NAME', got: " .. words end
    -- Neither of them can be more than a word of a shell, nor leave the folder.
    if not source:match("^[%w/._-]+$") or source:find("..", 1, true) or source:sub(1, #SOURCES) ~= SOURCES then
        return nil, "expected a source in " .. SOURCES .. ", of letters, digits, '/', '.', '_' and '-', got " .. source
    end
    if not name:match("^%w[%w._-]*$") then return nil, "expected a name of letters, digits, '.', '_' and '-', got " .. name end
    return source, name
end

local function run(command)
    local output = io.popen(command .. " 2>&1", "r")
    local text = output:read("*a")
    local ok = output:close()
    return ok, text
end

function slurm_bb_job_process(job_script)
    local source, problem = find_order(job_script)
    if not source and problem then return slurm.ERROR, "DLFS: " .. problem end
    return slurm.SUCCESS
end

function slurm_bb_data_in(job_id, job_script)
    local source, name = find_order(job_script)
    if not source then return name and slurm.ERROR or slurm.SUCCESS, name end
    if run(string.format("%s info '%s' %s", DLFS, VOLUME, name)) then return slurm.SUCCESS end
    local ok, text = run(string.format("%s --quiet import %s '%s' --name %s", DLFS, source, VOLUME, name))
    if not ok then return slurm.ERROR, text end
    return slurm.SUCCESS
end

-- Slurm calls these, and demands that they are there.
function slurm_bb_pools() return slurm.SUCCESS end
function slurm_bb_job_teardown(job_id, job_script, hurry) return slurm.SUCCESS end
function slurm_bb_setup(job_id, uid, gid, pool, bb_size, job_script) return slurm.SUCCESS end
function slurm_bb_test_data_in(job_id, job_script) return slurm.SUCCESS, "" end
function slurm_bb_real_size(job_id) return slurm.SUCCESS, "0" end
function slurm_bb_paths(job_id, job_script, path_file) return slurm.SUCCESS end
function slurm_bb_pre_run(job_id, job_script) return slurm.SUCCESS end
function slurm_bb_post_run(job_id, job_script) return slurm.SUCCESS end
function slurm_bb_data_out(job_id, job_script) return slurm.SUCCESS end
function slurm_bb_test_data_out(job_id, job_script) return slurm.SUCCESS, "" end
function slurm_bb_get_status(...) return slurm.SUCCESS, "" end
