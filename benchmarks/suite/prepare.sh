# Source it on a bare GPU machine from the project's root: a virtual environment over the machine's Python, with the
# packages of .whl/ if that folder is there, then the build. Our interpreters read no PYTHONPATH, so packages go in here.
set -e
venv=${TMPDIR:-/tmp}/st-vgpu-venv
if [ ! -e "$venv/ready" ]; then
    packages=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    python3 -m venv --without-pip "$venv"
    own=$("$venv/bin/python3" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    if compgen -G ".whl/*.whl" >/dev/null; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$own" .whl/*.whl
    fi
    printf '%s\n' "$packages" "$PWD" >"$own/machine.pth"
    touch "$venv/ready"
fi
export PATH="$venv/bin:$PATH" PYTHONUNBUFFERED=1 PREPARED=1
python3 setup.py -q build_ext --inplace 2>&1 | grep -iE '^(error|Traceback)|Error' || true
set +e
