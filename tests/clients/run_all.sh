#!/usr/bin/env bash
# run_all.sh [NAME...]: run other people's clients against Pagewick; without names, every one with a script run_NAME here.
#
# Each script gets its client, at the versions of requirements/, in an environment of its own below .venv/clients, and a server with the
# built-in model. A second run installs nothing. Needs the project's .venv (make install) and, for those in JavaScript, npm.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../.." && pwd)
environments=$project/.venv/clients
python=$project/.venv/bin/python

# The stamp is a copy of the requirements, so that other versions make a new environment.
is_installed() {
    cmp --silent "$1" "$2/.installed"
}

install_python() {
    local requirements=$1 environment=$2
    is_installed "$requirements" "$environment" && return
    echo "installing $(basename "$environment")"
    rm -rf "$environment"
    "$python" -m venv "$environment"
    "$environment/bin/python" -m pip install --disable-pip-version-check --quiet --requirement "$requirements" 2> "$environment/pip.log" \
        || { grep ERROR "$environment/pip.log" >&2; return 1; }
    cp "$requirements" "$environment/.installed"
}

install_node() {
    local requirements=$1 environment=$2
    is_installed "$requirements/package-lock.json" "$environment" && return
    echo "installing $(basename "$environment")"
    rm -rf "$environment"
    mkdir -p "$environment"
    cp "$requirements/package.json" "$requirements/package-lock.json" "$environment/"
    npm ci --prefix "$environment" --ignore-scripts --no-audit --no-fund --loglevel=error > /dev/null
    cp "$requirements/package-lock.json" "$environment/.installed"
}

# A subshell, which is not called in a condition: there bash would not end it at the first error.
run() (
    name=$1 script=$2
    environment=$environments/$name
    case $script in
        *.py) install_python "$here/requirements/$name.txt" "$environment"; command=("$environment/bin/python" "$script") ;;
        *.sh) install_python "$here/requirements/$name.txt" "$environment"; command=(bash "$script") ;;
        *.mjs)
            install_node "$here/requirements/$name" "$environment"
            # Node looks for packages beside the file that imports them.
            cp "$here"/*.mjs "$environment/"
            command=(node "$environment/$(basename "$script")")
            ;;
    esac
    echo "== $name"
    # Clients read these by themselves, and would send their requests to another server.
    unset OPENAI_API_KEY OPENAI_BASE_URL OPENAI_API_BASE HTTP_PROXY HTTPS_PROXY ALL_PROXY http_proxy https_proxy all_proxy
    export NO_PROXY=127.0.0.1 HF_HUB_OFFLINE=1 LITELLM_LOCAL_MODEL_COST_MAP=True LANGSMITH_TRACING=false PYTHONDONTWRITEBYTECODE=1
    PATH=$environment/bin:$environment/node_modules/.bin:$PATH "$python" "$here/with_server.py" "${command[@]}"
)

names=("$@")
if [ ${#names[@]} = 0 ]; then
    for script in "$here"/run_*; do
        name=$(basename "${script%.*}")
        [ "$name" = run_all ] || names+=("${name#run_}")
    done
fi

failed=()
for name in "${names[@]}"; do
    scripts=("$here/run_$name".*)
    [ -e "${scripts[0]}" ] || { echo "error: there is no tests/clients/run_$name.*" >&2; exit 2; }
    set +e
    run "$name" "${scripts[0]}" < /dev/null
    status=$?
    set -e
    [ $status = 0 ] || failed+=("$name")
done
echo "$((${#names[@]} - ${#failed[@]})) passed, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
[ ${#failed[@]} = 0 ]
