-- Module file of DLFS for Lmod: copy it to MODULEPATH as dlfs/VERSION.lua, and edit the paths and the volume.
help("DLFS: datasets for deep learning, read from NVMe storage nodes. See docs/slurm.md.")
whatis("Name: DLFS")

prepend_path("PATH", "/opt/dlfs/bin")
-- The batch scripts, and what they source.
setenv("DLFS_SLURM", "/opt/dlfs/slurm")
-- The volume of dlfs commands without one, and of jobs that serve it themselves.
setenv("DLFS_VOLUME", "nvme-tcp+discover://10.0.0.11,nvme-tcp+discover://10.0.0.12")
