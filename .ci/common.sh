# shellcheck shell=bash
# What the scripts in .ci share: where things live, which user servers run as, how servers are locked and stopped.
# Sourced, never run.

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# Nothing is built or installed outside this folder and the checkout's target/.
# Layout: pgNN/ a private server for each major version, data/pgNN/ its test clusters, pgrx/ cargo-pgrx's
# configuration, cargo/ cargo-pgrx itself, venv/ and node/ for the examples, load/ for the benchmarks, root-pgNN.tar a
# clean Debian to try packages in, target/ and logs/ of .ci/run.
if [ "$(id -u)" = 0 ]; then
    default_cache=/var/cache/named_locks
else
    default_cache=${XDG_CACHE_HOME:-$HOME/.cache}/named_locks
fi
cache=$(realpath -m "${NAMED_LOCKS_CACHE:-$default_cache}")

export NAMED_LOCKS_CACHE=$cache
export PGRX_HOME=$cache/pgrx
# A fresh rustup is often not on the PATH yet.
export PATH=$cache/cargo/bin:$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
# pgrx's tests log in as $USER, which containers often leave out.
USER=$(id -un)
export USER
# In the environment these would take away the linker flags that cargo-pgrx passes.
unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS
# The tests say themselves which server they mean.
unset PGHOST PGHOSTADDR PGPORT PGDATABASE PGUSER PGPASSWORD PGOPTIONS PGSERVICE PGDATA PGSSLMODE PG_CONFIG_PATH

# initdb and postgres refuse to run as root, so root hands them to this user; empty: no change of user.
server_user=
if [ "$(id -u)" = 0 ]; then
    server_user=postgres
fi

say() {
    printf '%s\n' "$*"
}

# One line of the message per argument.
die() {
    printf 'named_locks: %s\n' "$1" >&2
    shift
    if [ $# -gt 0 ]; then
        printf '    %s\n' "$@" >&2
    fi
    exit 1
}

# The value of a simple `key = "value"` line of Cargo.toml, a leading = taken off.
cargo_toml() {
    sed -n "s/^$1 *= *\"=\\{0,1\\}\\([^\"]*\\)\".*/\\1/p" "$checkout/Cargo.toml"
}

# Calls its arguments with each package that has a Cargo.lock of its own; fails when one has failed.
each_package() {
    local manifest outcome=0
    for manifest in Cargo.toml bench/load/Cargo.toml examples/clients/rust/Cargo.toml; do
        "$@" --manifest-path "$checkout/$manifest" || outcome=1
    done
    return "$outcome"
}

pg_bin() {
    printf '%s\n' "$cache/pg$1/bin"
}

have_server() {
    [ -x "$(pg_bin "$1")/pg_config" ]
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif sudo -n true 2>/dev/null; then
        sudo -n "$@"
    else
        sudo "$@"
    fi
}

# Sets `pg_config`, a full path, `version` and `major`: of the PostgreSQL that $1 belongs to, or the one on the PATH.
# Sets `staged`: the folder into which .ci/build builds for it.
find_postgresql() {
    local given=${1:-pg_config}
    pg_config=$(command -v "$given") || die "there is no $given" "say which: make PG_CONFIG=/path/to/pg_config"
    # Not its real path: a wrapper goes by the name it is called by.
    [[ $pg_config = /* ]] || pg_config=$PWD/$pg_config
    version=$("$pg_config" --version)
    major=${version#PostgreSQL }
    major=${major%%[!0-9]*}
    # shellcheck disable=SC2034 # for who calls this
    staged=${CARGO_TARGET_DIR:-$checkout/target}/named_locks-pg$major
}

as_server_user() {
    if [ -n "$server_user" ]; then
        runuser -u "$server_user" -- "$@"
    else
        "$@"
    fi
}

# Two builds must not put their library into one private server at once, nor under a running server.
# The lock goes with this process; programs it starts get `9>&-`, or a server left behind would keep it.
lock_server() {
    exec 9>"$cache/pg$1.lock"
    if ! flock -n 9; then
        say "waiting for another run that uses the private PostgreSQL $1"
        flock 9
    fi
}

# Stops the servers and poolers that were left running under folder $1, at once. Known by their working directory or
# their arguments together with their program, never by name alone: the machine may run servers of its own.
stop_servers() {
    local pids tries
    mapfile -t pids < <(servers_under "$1")
    [ ${#pids[@]} -gt 0 ] || return 0
    say "stopping what was left running in $1"
    # Tests stop processes in their tracks; such a one would sleep on.
    kill -CONT "${pids[@]}" 2>/dev/null || true
    kill -QUIT "${pids[@]}" 2>/dev/null || true
    for ((tries = 0; tries < 100; tries++)); do
        mapfile -t pids < <(servers_under "$1")
        [ ${#pids[@]} -gt 0 ] || return 0
        sleep 0.1
    done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}

servers_under() {
    local process
    {
        # Each process of a server stands in its data directory.
        find /proc -maxdepth 2 -path '/proc/[0-9]*/cwd' -lname "$1/*" -printf '%h\n' 2>/dev/null || true
        grep -alsF "$1/" /proc/[0-9]*/cmdline | sed 's,/cmdline$,,' || true
    } | sort -u | while IFS= read -r process; do
        case $(readlink "$process/exe" 2>/dev/null) in
            */postgres | */pgbouncer | */postgres\ * | */pgbouncer\ *) printf '%s\n' "${process#/proc/}" ;;
        esac
    done
}

# Sets `data`: an empty folder for the test clusters of major version $1, writable by the servers' user, and with it
# TMPDIR: whatever a test starts lies under it, and so is stopped and cleared away with it.
fresh_data_dir() {
    data=$cache/data/pg$1
    # The name of a Unix socket may have 107 bytes; clusters and socket names below need about 50.
    if [ ${#data} -gt 60 ]; then
        die "the path $data is too long for servers' sockets" "set NAMED_LOCKS_CACHE to a shorter one"
    fi
    stop_servers "$data"
    rm -rf "$data"
    mkdir -p "$data"
    # As /tmp is: other users may make files in it and nobody removes another's.
    mkdir -m 1777 "$data/tmp"
    if [ -n "$server_user" ]; then
        chown "$server_user" "$data"
        as_server_user test -w "$data" ||
            die "the user $server_user can't reach $data" "set NAMED_LOCKS_CACHE to a folder that every user may enter"
    fi
    export TMPDIR=$data/tmp
}
