#!/bin/sh
# Removes from a virtual environment what no command of the image uses, and compiles what is imported: trim.sh VENV MODULE...
# Without compiled modules each command would compile them anew, as its user may not write them; all of them would take 50 MB.
set -eu
environment=$1
shift
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Tests of the packages themselves.
find "$packages" -type d \( -name tests -o -name _tests \) -prune -exec rm -rf {} +
find "$packages/numpy" \( -name '*_tests.*.so' -o -name '_simd.*.so' \) -delete
# What only a compiler or a type checker needs.
rm -rf "$packages/numpy/f2py" "$packages/numpy/distutils" "$environment/include"
find "$packages" -type f \( -name '*.a' -o -name '*.h' -o -name '*.c' -o -name '*.pxd' -o -name '*.pyx' -o -name '*.pyi' \) -delete
# botocore describes each of Amazon's services; S3 needs these, for data and for the credentials of service accounts.
if [ -d "$packages/botocore/data" ]; then
    find "$packages/botocore/data" -mindepth 1 -maxdepth 1 -type d ! -name s3 ! -name sts ! -name 'sso*' -exec rm -rf {} +
fi
# pygments colours the languages of files; tracebacks are Python.
find "$packages/pygments/lexers" -name '*.py' ! -name '__init__.py' ! -name '_mapping.py' ! -name python.py -delete
# The backend of zstandard for PyPy.
rm -f "$packages"/zstandard/_cffi.*.so
# Symbols for debuggers: half of the size of zstandard and aiohttp. numpy's libraries do not load any more once they are stripped.
find "$packages" -name '*.so' ! -path '*/numpy/*' ! -path '*/numpy.libs/*' -exec strip --strip-unneeded {} +
export PYTHONPYCACHEPREFIX="$environment/cache"
"$environment/bin/python" -m compileall -q "$packages/dlfs"
for module in "$@"; do "$environment/bin/python" -c "import $module"; done
# What was removed is not missed: a dataset is made and read, and the libraries of s3:// load.
PATH="$environment/bin:$PATH"
scratch=$(mktemp -d)
dlfs format "$scratch/volume.img" --size 16MiB
dlfs import "$packages/trio" "$scratch/volume.img" --name trial
dlfs verify "$scratch/volume.img"
dlfs doctor "$scratch/volume.img" >/dev/null || true
rm -r "$scratch"
PYTHONDONTWRITEBYTECODE=1 python -c 'import s3fs; s3fs.S3FileSystem(anon=True)'
