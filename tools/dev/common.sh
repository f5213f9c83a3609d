# Sourced by ./dev and tools/dev/*.sh: where things are, and how the machine is set up. Needs bash and apt only.
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'dev: %s\n' "$*" >&2; exit 1; }

# Services and containers may set no HOME; the shell knows it all the same.
[ -n "${HOME:-}" ] || { unset HOME; export HOME=~; }
export PACELINE_CACHE="${PACELINE_CACHE:-$HOME/.cache/paceline}"

# under_lock FILE COMMAND …: one at a time, of all that share the cache, or this tree.
under_lock() {
  local file="$1"; shift
  { mkdir -p "$(dirname "$file")" && : >>"$file"; } || die "$file can't be written; PACELINE_CACHE names another cache"
  (flock -n 9 || { say "waiting for another ./dev ($file)"; flock 9; }; "$@") 9>>"$file"
}

SYSTEM_PACKAGES=(
  build-essential cmake ninja-build ccache clang clang-format clang-tidy libclang-rt-14-dev pkg-config
  libfmt-dev libspdlog-dev nlohmann-json3-dev libcli11-dev libhwy-dev libsodium-dev
  libgtest-dev libbenchmark-dev librapidcheck-dev
  python3 python3-venv python3-pip python3-dev python3-torch python3-pytest
  iproute2 ethtool procps openssh-server openssh-client openmpi-bin mpich git ca-certificates
)

setup_system() {
  local stamp key
  key=$(printf '%s\n' "${SYSTEM_PACKAGES[@]}" | sha256sum | cut -c1-16)
  stamp="$PACELINE_CACHE/system-$key"
  # The stamp may come from another machine that shares the cache: ask dpkg as well.
  if [ -e "$stamp" ] && dpkg-query -W "${SYSTEM_PACKAGES[@]}" >/dev/null 2>&1; then return; fi
  under_lock "$PACELINE_CACHE/lock" install_packages
  touch "$stamp"
}

install_packages() {
  if ! dpkg-query -W -f '${Status}\n' "${SYSTEM_PACKAGES[@]}" 2>/dev/null | awk '!/ok installed/{bad=1} END{exit bad}' ||
     ! dpkg-query -W "${SYSTEM_PACKAGES[@]}" >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] || die "these Debian packages are needed; as root: apt-get install ${SYSTEM_PACKAGES[*]}"
    say "installing Debian packages"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${SYSTEM_PACKAGES[@]}" \
      >"${TMPDIR:-/tmp}/paceline-apt.log" 2>&1 || { tail -20 "${TMPDIR:-/tmp}/paceline-apt.log"; die "apt-get failed"; }
  fi
}

# setup_python NAME: an environment with requirements/NAME.txt. The packages are installed once per content under
# the cache; the tree's own .venv (main) or build/venv/NAME only points there and to this tree's python/.
setup_python() {
  local name="${1:-main}" key base venv
  key=$(sha256sum "requirements/$name.txt" | cut -c1-16)
  base="$PACELINE_CACHE/venv-$name-$key"
  [ -e "$base/complete" ] || under_lock "$PACELINE_CACHE/lock" fill_environment "$name" "$base"
  if [ "$name" = main ]; then venv=.venv; else venv="build/venv/$name"; fi
  # A copied or moved tree brings an environment that points to where it was made: its path is compared too.
  [ "$(cat "$venv/base" 2>/dev/null)" = "$base $PWD" ] || under_lock build/lock point_environment "$venv" "$base"
}

fill_environment() {
  local name="$1" base="$2"
  [ -e "$base/complete" ] && return
  say "making the Python environment '$name' (once)"
  rm -rf "$base"
  # One chain: where the caller goes on without it, bash does not stop at the first command that fails.
  /usr/bin/python3 -m venv "$base" && "$base/bin/pip" install -q --progress-bar off -r "requirements/$name.txt" && touch "$base/complete"
}

# setup_nvcc BUILD: sets NVCC_OPTION, what CMake is told of nvcc in that folder: nothing where it was given one by hand,
# else the system's, which CMake finds, else the one of NVIDIA's packages for Python, installed once like an environment.
# Where they can't be had a line says what that means, and NVCC_MISSING is not empty.
setup_nvcc() {
  local key base given
  key=$(sha256sum requirements/cuda.txt | cut -c1-16)
  base="$PACELINE_CACHE/venv-cuda-$key"
  given=$(sed -n 's/^PACELINE_NVCC:[^=]*=//p' "$1/CMakeCache.txt" 2>/dev/null || true)
  NVCC_OPTION=() NVCC_MISSING=
  case "$given" in "" | "$PACELINE_CACHE"/venv-cuda-*) ;; *) return ;; esac
  NVCC_OPTION=(-DPACELINE_NVCC=)
  if nvcc --version >/dev/null 2>&1 || /usr/local/cuda/bin/nvcc --version >/dev/null 2>&1; then return; fi
  local patience=(1 10)
  [ "${REQUIRE:-}" != nvcc ] || patience=(5 60)
  if [ -e "$base/complete" ] ||
     PIP_RETRIES=${patience[0]} PIP_DEFAULT_TIMEOUT=${patience[1]} under_lock "$PACELINE_CACHE/lock" fill_environment cuda "$base"; then
    NVCC_OPTION=("-DPACELINE_NVCC=$(echo "$base"/lib/python3*/site-packages/nvidia/cu*/bin/nvcc)")
  else
    NVCC_MISSING=1
    [ "${REQUIRE:-}" != nvcc ] || die "nvcc is missing and could not be installed (above), and REQUIRE=nvcc asks for it"
    say "nvcc is missing and could not be installed (above): no device code is built, and CUDA models keep torch's own all-reduce"
  fi
}

point_environment() {
  local venv="$1" base="$2"
  [ "$(cat "$venv/base" 2>/dev/null)" = "$base $PWD" ] && return
  rm -rf "$venv"; mkdir -p "$(dirname "$venv")"
  /usr/bin/python3 -m venv --without-pip "$venv"
  local site; site=$(echo "$venv"/lib/python3*/site-packages)
  printf 'import site; site.addsitedir("%s")\n%s\n' "$(echo "$base"/lib/python3*/site-packages)" "$PWD/python" >"$site/paceline-tree.pth"
  local script bin lines; bin="$(cd "$venv/bin" && pwd)"
  for script in "$base"/bin/*; do
    [ -e "$venv/bin/$(basename "$script")" ] && continue
    lines=$(lines_of_interpreter "$script")
    if [ "$lines" != 0 ]; then
      { name_interpreter "$bin/python3"; tail -n "+$((lines + 1))" "$script"; } >"$venv/bin/$(basename "$script")"
      chmod +x "$venv/bin/$(basename "$script")"
    else
      ln -s "$script" "$venv/bin/"
    fi
  done
  printf '%s\n' "$base $PWD" >"$venv/base"
}

# name_interpreter PATH: how a Python script begins. The kernel takes no blank in the path, and so many bytes only: then
# the shell starts it, by a line that is an idle text for Python, as in pip's own scripts.
name_interpreter() {
  if [ ${#1} -le 120 ] && [ "${1#*[[:space:]]}" = "$1" ]; then
    printf '#!%s\n' "$1"
  else
    printf "#!/bin/sh\n'''exec' \"%s\" \"\$0\" \"\$@\"\n' '''\n" "$1"
  fi
}

# lines_of_interpreter FILE: how many of its first lines name its Python; 0: it is no such script.
lines_of_interpreter() {
  if [ "$(head -c 2 "$1")" != '#!' ]; then
    echo 0
  elif head -1 "$1" | grep -q python; then
    echo 1
  elif sed -n 2p "$1" | grep -q "^'''exec'"; then
    echo 3
  else
    echo 0
  fi
}

build_release() {
  say "building"
  under_lock build/lock build_tree
}

build_tree() {
  setup_nvcc build
  cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "${NVCC_OPTION[@]}" >build/configure.log 2>&1 || { cat build/configure.log; die "cmake failed"; }
  cmake --build build
}
