# Shared by the make_*_env.sh scripts; sourced, never run.
#
# An environment is a virtual environment that holds one real part (vLLM, Dynamo) and this package, editable, beside it.
# Making one is idempotent: every stage leaves a stamp, the hash of what it was made from, and is skipped while the hash is
# the same. A stage that was interrupted has no stamp and runs again.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

die() { say "$*"; exit 1; }

# open_environment DIR: creates the virtual environment if there is none and holds its lock until the script ends, so that
# two callers never install into it at once. Sets `env_dir` (absolute) and `env_python`.
open_environment() {
    mkdir -p "$1"
    env_dir=$(cd "$1" && pwd)
    env_python=$env_dir/bin/python
    exec 9>"$env_dir/.lock"
    flock 9
    if ! "$env_python" -m pip --version >/dev/null 2>&1; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "needs Python 3.11 or newer (set PYTHON)"
        "${PYTHON:-python3}" -m venv "$env_dir"
    fi
}

# hash_of FILE...: one hash over the files' contents and the repository's place (an editable install points at it).
hash_of() { { printf '%s\n' "$root"; cat "$@"; } | sha256sum | cut -d' ' -f1; }

# rollplane_hash_of FILE...: the same, with the parts of pyproject.toml that decide what is installed.
rollplane_hash_of() { hash_of "$@" <(sed '/^\[tool\./,$d' "$root/pyproject.toml"); }

is_current() { [ "$(cat "$env_dir/.stamp-$1" 2>/dev/null)" = "$2" ]; }

mark_current() { printf '%s\n' "$2" >"$env_dir/.stamp-$1"; }

forget_stage() { rm -f "$env_dir/.stamp-$1"; }

pip_install() { "$env_python" -m pip install --quiet --disable-pip-version-check "$@"; }

site_packages() { "$env_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# install_rollplane EXTRA...: this package, editable, with the requirements of the extras. Everything that is already
# installed is a constraint: the real part keeps exactly the versions that it was made with (above all its torch), and
# a requirement that would move one is an error here instead of a broken engine later.
install_rollplane() {
    local installed=$env_dir/.installed.txt
    "$env_python" -m pip freeze --all --exclude-editable --disable-pip-version-check 2>/dev/null |
        grep -viE '^(pip|setuptools|rollplane)\b|^vllm==| @ ' >"$installed"
    "$env_python" - "$root/pyproject.toml" "$@" >"$env_dir/.requirements.txt" <<'PY'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project.get("optional-dependencies", {})
pending, seen, lines = sys.argv[2:], set(), list(project.get("dependencies", []))
while pending:
    extra = pending.pop()
    if extra in seen:
        continue
    seen.add(extra)
    if extra not in extras:
        sys.exit(f"pyproject.toml has no extra named {extra!r}")
    for line in extras[extra]:
        if line.replace(" ", "").startswith(project["name"] + "["):  # an extra made of other extras
            pending += line[line.index("[") + 1 : line.index("]")].replace(" ", "").split(",")
        else:
            lines.append(line)
print("\n".join(lines))
PY
    pip_install --constraint "$installed" --requirement "$env_dir/.requirements.txt"
    pip_install --no-deps --editable "$root"
}
