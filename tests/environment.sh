# Sourced by scripts: make_environment EXTRAS makes or reuses a virtual environment with everplex installed in it.
VENV="${EVERPLEX_VENV:-.venv}"

make_environment() {
    local python="${PYTHON:-python3}" stamp
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "everplex needs Python 3.11 or newer; set PYTHON to one" >&2; return 2; }
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
    # The dependencies are installed again only when what asks for them changed.
    stamp="$1 $(cat pyproject.toml constraints.txt | sha256sum)"
    if [ "$stamp" != "$(cat "$VENV/everplex-$1.stamp" 2>/dev/null)" ]; then
        echo "== installing everplex[$1] into $VENV"
        "$VENV/bin/pip" install --quiet --constraint constraints.txt ".[$1]"
        echo "$stamp" >"$VENV/everplex-$1.stamp"
    fi
    "$VENV/bin/pip" install --quiet --no-deps --force-reinstall .
}
