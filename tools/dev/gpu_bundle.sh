#!/usr/bin/env bash
# ./dev gpu-bundle: one archive with all that the GPU suite and benchmarks need on a machine that has a driver, Python
# and torch but no Debian packages and no network: this tree, its stripped build, iproute2 with its libraries, and
# compute-sanitizer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. tools/dev/common.sh

out="build/gpu-bundle.tgz"
stage="$(mktemp -d)"; trap 'rm -rf "$stage"' EXIT
tree="$stage/paceline"
mkdir -p "$tree/build/bin" "$tree/build/lib" "$tree/iproute2"

say "programs and libraries"
cmake --build build --target gpu_kernels
for file in paceline paceline-codec-alone wire_threads_bench gpu_kernels; do
  strip -o "$tree/build/bin/$file" "build/bin/$file"
done
for file in build/lib/*.so; do strip --strip-unneeded -o "$tree/$file" "$file"; done

# What they link to beside the C and C++ runtime may be missing there, or of another version.
mkdir "$tree/system-lib"
ldd "$tree"/build/bin/* "$tree"/build/lib/*.so | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
  grep -Ev '/(libpaceline[^/]*|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s)\.so' | xargs -I{} cp -L {} "$tree/system-lib/"

say "iproute2"
# Debian's, apart from the system: what it links to may be older or newer there.
packages=(iproute2 libbpf1 libmnl0 libelf1 libcap2 libbsd0 libmd0 libtirpc3 libxtables12 libdb5.3)
(cd "$stage" && apt-get download -qq "${packages[@]}" && for deb in *.deb; do dpkg -x "$deb" "$tree/iproute2"; done)
rm -rf "$tree"/iproute2/usr/share
mkdir "$tree/tools-bin"
for tool in bin/ip sbin/tc; do
  printf '#!/bin/sh\nroot="$(dirname "$(readlink -f "$0")")/../iproute2"\nLD_LIBRARY_PATH="%s" exec "$root/%s" "$@"\n' \
    '$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu' "$tool" >"$tree/tools-bin/${tool#*/}"
  chmod +x "$tree/tools-bin/${tool#*/}"
done

say "NVIDIA's sanitizer for kernels"
# The packages of 13.0 lack what starts the program to be watched.
(cd "$stage" && /usr/bin/python3 -m pip download -q --no-deps "nvidia-cuda-sanitizer-api==13.5.*")
mkdir "$tree/sanitizer"
/usr/bin/python3 -m zipfile -e "$stage"/nvidia_cuda_sanitizer_api-*.whl "$tree/sanitizer"
chmod -R a+x "$tree"/sanitizer/nvidia
rm -rf "$tree"/sanitizer/nvidia/*/{include,compute-sanitizer/docs}

say "the tree"
cp -r bench docs python tests tools pyproject.toml "$tree/"
find "$tree" -name __pycache__ -prune -exec rm -rf {} +
cat >"$tree/on-gpus" <<'TEXT'
#!/usr/bin/env bash
# Runs a command in this tree with its tools found: ./on-gpus python3 bench/gpu/train.py
# Multicast over NVLink needs a fabric manager that such machines may lack; everything else is as the machine has it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
sanitizer=("$here"/sanitizer/nvidia/*/bin)
export PATH="$here/tools-bin:${sanitizer[0]}:$PATH" LD_LIBRARY_PATH="$here/build/lib:$here/system-lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" PYTHONUNBUFFERED=1
cd "$here"
exec "$@"
TEXT
chmod +x "$tree/on-gpus"
tar -C "$stage" -czf "$out" paceline
say "$out ($(du -h "$out" | cut -f1)); there: tar xzf gpu-bundle.tgz && paceline/on-gpus python3 bench/gpu/train.py"
