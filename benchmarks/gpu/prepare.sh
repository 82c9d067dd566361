# Source it on a bare GPU machine from the project's root: Python packages from .whl/ if that folder is there, then the build.
set -e
if compgen -G ".whl/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "${TMPDIR:-/tmp}/site" .whl/*.whl
    export PYTHONPATH="${TMPDIR:-/tmp}/site:$PWD"
fi
export PYTHONUNBUFFERED=1 PREPARED=1
python3 setup.py -q build_ext --inplace 2>&1 | grep -iE '^(error|Traceback)|Error' || true
set +e
