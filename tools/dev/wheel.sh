#!/usr/bin/env bash
# ./dev wheel: dist/paceline-VERSION-py3-none-manylinux_2_28_x86_64.whl, compiled for glibc 2.28 and tried in a clean
# environment. Third-party code is header-only or linked in statically: Debian's libraries where it ships a static one,
# else (Highway) built from Debian's source package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/dev/common.sh
setup_system
setup_python wheel

# fetch_source NAME: unpacks Debian's source package under the cache, from the mirrors that this system already uses.
fetch_source() {
  local name="$1" dir="$PACELINE_CACHE/source-$1"
  [ -e "$dir/complete" ] && return
  say "fetching Debian's source of $name (once)"
  rm -rf "$dir"; mkdir -p "$dir/lists/partial"
  apt-get indextargets --format 'deb-src $(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' | sort -u >"$dir/sources.list"
  local options=(-qq -o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=/dev/null
                 -o "Dir::State::lists=$dir/lists" -o Dir::Cache::srcpkgcache= -o Dir::Cache::pkgcache=
                 -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$dir" && apt-get "${options[@]}" source --download-only "$name" && mkdir tree && tar xf ./*.orig.tar.* -C tree --strip-components=1)
  touch "$dir/complete"
}
under_lock "$PACELINE_CACHE/lock" fetch_source highway
setup_nvcc build-wheel

# Headers only of what is taken from the system: its C library must stay out of sight of the cross compiler.
build=build-wheel
mkdir -p "$build/include"
for header in fmt spdlog nlohmann CLI sodium sodium.h; do ln -sfn "/usr/include/$header" "$build/include/$header"; done
zig="$PWD/build/venv/wheel/bin/python-zig"
for tool in c++ ar ranlib; do
  target=""; [ "$tool" = c++ ] && target="-target x86_64-linux-gnu.2.28"
  printf '#!/bin/sh\nexec "%s" %s %s "$@"\n' "$zig" "$tool" "$target" >"$build/zig-$tool"; chmod +x "$build/zig-$tool"
done
# nvcc does not know the cross compiler, and takes device code alone from the host's.
say "compiling for glibc 2.28 (the first time builds the C++ library too: some minutes)"
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPACELINE_TESTS=OFF \
  -DCMAKE_CXX_COMPILER="$PWD/$build/zig-c++" -DCMAKE_AR="$PWD/$build/zig-ar" -DCMAKE_RANLIB="$PWD/$build/zig-ranlib" \
  -DPACELINE_NVCC_CXX="$(command -v g++)" -DCMAKE_CXX_COMPILER_LAUNCHER= -DCMAKE_CXX_FLAGS="-isystem $PWD/$build/include" \
  -DPACELINE_SODIUM="/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH)/libsodium.a" \
  -DPACELINE_HWY_SOURCE_DIR="$PACELINE_CACHE/source-highway/tree" -DPACELINE_SYSTEM_FMT=OFF "${NVCC_OPTION[@]}" >"$build/configure.log" || { tail -20 "$build/configure.log"; exit 1; }
cmake --build "$build"

say "packing"
stage="$build/stage"
rm -rf "$stage"; mkdir -p "$stage"
cp -r python/. "$stage/"
find "$stage" -name __pycache__ -prune -exec rm -rf {} +
mkdir -p "$stage/paceline/lib" "$stage/paceline/bin" dist
cp -r examples "$stage/paceline/"
cp "$build"/lib/*.so "$stage/paceline/lib/"
cp "$build/bin/paceline" "$stage/paceline/bin/paceline"
strip "$stage"/paceline/lib/*.so "$stage/paceline/bin/paceline"
newest=$(objdump -T "$stage"/paceline/lib/*.so "$stage/paceline/bin/paceline" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
dpkg --compare-versions "${newest#GLIBC_}" le 2.28 || die "the wheel needs $newest"
foreign=$(objdump -p "$stage"/paceline/lib/*.so "$stage/paceline/bin/paceline" | awk '$1 == "NEEDED" {print $2}' |
  sort -u | grep -vE '^(ld-linux-x86-64|lib(c|m|dl|pthread|rt|paceline))\.so' || true)
[ -z "$foreign" ] || die "the wheel needs libraries beyond the C library: $foreign"
strays=$(objdump -p "$stage"/paceline/lib/*.so "$stage/paceline/bin/paceline" | awk '$1 ~ /^R(UN)?PATH$/ && $2 != "$ORIGIN" {print $2}')
[ -z "$strays" ] || die "the wheel looks for libraries in folders of this machine: $strays"
# Each image of device code begins with the magic number of a fatbin.
images=$({ LC_ALL=C grep -oaP '\x50\xed\x55\xba' "$stage/paceline/lib/libpaceline_cuda.so" || true; } | wc -l)
sources=(src/device/cuda/*.cu)
[ -n "$NVCC_MISSING" ] || [ "$images" = ${#sources[@]} ] ||
  die "libpaceline_cuda.so holds $images images of device code, of ${#sources[@]} sources: see PACELINE_NVCC in $build/CMakeCache.txt"
rm -f dist/*.whl
build/venv/wheel/bin/pip wheel -q --no-deps --no-build-isolation -w dist \
  --config-settings=--build-option=--python-tag=py3 --config-settings=--build-option=--plat-name=manylinux_2_28_x86_64 "$stage"
wheel=$(ls dist/*.whl)

say "trying it in a clean environment"
trial="$build/trial"
rm -rf "$trial"; /usr/bin/python3 -m venv "$trial"
"$trial/bin/pip" install -q --no-index "$wheel"
(cd / && env -u PYTHONPATH "$OLDPWD/$trial/bin/python" -c 'import paceline; print("paceline", paceline.__version__)' && "$OLDPWD/$trial/bin/paceline" --version &&
  "$OLDPWD/$trial/bin/python" -c 'import ctypes, glob, os, paceline
for library in glob.glob(os.path.join(os.path.dirname(paceline.__file__), "lib", "*.so")): ctypes.CDLL(library)' &&
  "$OLDPWD/$trial/bin/python" -m paceline.compat --install perseus --target "$OLDPWD/$trial/compat" &&
  "$OLDPWD/$trial/bin/python" -m py_compile "$OLDPWD/$trial/compat/perseus/examples/pytorch_native_ddp_demo.py" &&
  "$OLDPWD/$trial/bin/paceline" run -np 2 -- "$OLDPWD/$trial/bin/python" -m paceline.selftest)
say "$wheel needs $newest and nothing else"
[ -z "$NVCC_MISSING" ] || printf 'dev: WARNING: %s has NO DEVICE CODE, as nvcc is missing: CUDA models keep torch'"'"'s own all-reduce\n' "$wheel" >&2
