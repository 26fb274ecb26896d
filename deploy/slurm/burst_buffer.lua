-- burst_buffer/lua of Slurm: imports datasets into the volume before a job starts, as lines at the head of its script say.
--
--     #DLFS stage_in source=/data/photos name=photos
--     #DLFS stage_in source=/data/today name=today-%j remove=yes
--
-- A dataset that exists stays as it is. With remove=yes it is the job's own, which its name says by the job's ID, %j, and is
-- removed when the job has ended. The file goes next to slurm.conf, on slurmctld's machine, where dlfs must be and reach
-- sources and storage; docs/slurm.md has the settings of Slurm. slurmctld runs it as SlurmUser. It reads and writes as the
-- job's user, by AS_USER; where SlurmUser is not root, that can be "sudo -n -u '#%d' -g '#%d' --".
local VOLUME = "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12"
local PATH = "/opt/dlfs/bin:/usr/sbin:/usr/bin:/sbin:/bin"
local AS_USER = "setpriv --reuid %d --regid %d --init-groups --"

-- Exit codes of dlfs.
local NOT_FOUND, LOCKED = 3, 5

local function quote(text)
    return "'" .. text:gsub("'", "'\\''") .. "'"
end

-- Returns the status and the output of a command of a shell. In Lua 5.1, the file's close does not tell the status.
local function run(command)
    local pipe = io.popen("exec 2>&1 </dev/null; " .. command .. "\necho \" $?\"", "r")
    local output, status = pipe:read("*a"):match("^(.*) (%d+)\n$")
    pipe:close()
    return tonumber(status) or 1, (output or "no output"):match("^%s*(.-)%s*$")
end

-- Returns one order, of the words of a directive, or nil and what is wrong.
local function read_order(line)
    local expected = "expected '#DLFS stage_in source=PATH name=NAME [remove=yes]', got '" .. line .. "'"
    local order, verb = {}, nil
    for word in line:gsub("^#DLFS%s*", ""):gmatch("%S+") do
        local key, value = word:match("^(%l+)=(.+)$")
        if not verb then
            verb = word
        elseif (key == "source" or key == "name" or key == "remove") and not order[key] then
            order[key] = value
        else
            return nil, expected
        end
    end
    if verb ~= "stage_in" or not order.source or not order.name then return nil, expected end
    if order.remove and order.remove ~= "yes" then return nil, expected end
    -- slurmctld's directory is not the user's, and no word is an option.
    if order.source:sub(1, 1) ~= "/" then return nil, "expected an absolute path as source, got '" .. order.source .. "'" end
    if order.name:sub(1, 1) == "-" then return nil, "expected a name without '-' at its beginning, got '" .. order.name .. "'" end
    return order
end

-- Returns the orders at the head of a script, or nil and what is wrong. job: its ID; "%j" while there is none.
local function read_orders(script, job)
    local file, problem = io.open(script, "r")
    if not file then return nil, problem end
    local orders = {}
    for line in file:lines() do
        if line:sub(1, 1) ~= "#" then break end
        if line:match("^#DLFS%f[^%w]") then
            local order
            order, problem = read_order(line)
            if not order then break end
            order.name = order.name:gsub("%%j", { ["%j"] = job }) -- Slurm has done it in some of its calls
            if order.remove and not order.name:find(job, 1, true) then
                problem = "expected %j in the name of a dataset to remove, got '" .. order.name .. "'"
                break
            end
            orders[#orders + 1] = order
        end
    end
    file:close()
    if problem then return nil, problem end
    return orders
end

-- Returns a function that runs dlfs as a job's user, and waits for other writers of the volume: Slurm sets the time.
local function user_of(job)
    -- Numbers: names of users and jobs can be anything.
    local status, shown = run("squeue --noheader --states=all --format=%U:%G --job=" .. tonumber(job))
    local uid, gid = shown:match("^(%d+):(%d+)")
    if status ~= 0 or not uid then return nil, "cannot find the user of job " .. job .. ": " .. shown end
    local become = AS_USER:format(uid, gid) .. " env -i PATH=" .. quote(PATH)
    become = become .. ' LANG=C.UTF-8 HOME="$(getent passwd ' .. uid .. ' | cut -d: -f6)" '
    return function(arguments)
        local code, output
        repeat
            code, output = run(become .. "dlfs --quiet " .. arguments)
        until code ~= LOCKED or run("sleep 2") ~= 0
        return code, output
    end
end

local function stage_in(job, script)
    local orders, problem = read_orders(script, job)
    if not orders then return slurm.ERROR, problem end
    local dlfs
    dlfs, problem = user_of(job)
    if not dlfs then return slurm.ERROR, problem end
    for _, order in ipairs(orders) do
        local name = quote(order.name)
        local status, output = dlfs("info " .. quote(VOLUME) .. " " .. name)
        if status == NOT_FOUND then
            status, output = dlfs("import " .. quote(order.source) .. " " .. quote(VOLUME) .. " --name " .. name)
        end
        if status ~= 0 then return slurm.ERROR, output end
    end
    return slurm.SUCCESS
end

-- Removes the datasets of a job, also if their import was ended before its time.
local function remove(job, script)
    local orders, problem = read_orders(script, job)
    if not orders then return slurm.ERROR, problem end
    for _, order in ipairs(orders) do
        if order.remove then
            local dlfs
            dlfs, problem = user_of(job)
            if not dlfs then return slurm.ERROR, problem end
            local volume, name = quote(VOLUME), quote(order.name)
            for _, arguments in ipairs({
                "import --abandon " .. name .. " " .. volume,
                "rm " .. volume .. " " .. name .. " --all-versions --yes",
            }) do
                local status, output = dlfs(arguments)
                if status ~= 0 and status ~= NOT_FOUND then return slurm.ERROR, output end
            end
        end
    end
    return slurm.SUCCESS
end

-- What Slurm calls. slurm_bb_job_process: when a job is submitted; it must return at once.
function slurm_bb_job_process(script)
    local orders, problem = read_orders(script, "%j")
    if not orders then return slurm.ERROR, "dlfs: " .. problem end
    return slurm.SUCCESS
end

function slurm_bb_data_in(job, script)
    return stage_in(job, script)
end

function slurm_bb_job_teardown(job, script)
    return remove(job, script)
end

-- Slurm demands that these are there.
function slurm_bb_pools() return slurm.SUCCESS end
function slurm_bb_setup() return slurm.SUCCESS end
function slurm_bb_real_size() return slurm.SUCCESS end
function slurm_bb_paths() return slurm.SUCCESS end
function slurm_bb_pre_run() return slurm.SUCCESS end
function slurm_bb_post_run() return slurm.SUCCESS end
function slurm_bb_data_out() return slurm.SUCCESS end
function slurm_bb_get_status() return slurm.SUCCESS, "" end
