#!/usr/bin/env bash
# Build the engine with sanitizers and run its tests: sanitize.sh VENV address|thread [CASES].
#
# thread: ThreadSanitizer, under tests/support/native/engine_driver.cc on 2 and 4 ranks; CASES are its modes.
# address: AddressSanitizer and UBSan, under this driver on 4 ranks, and the Python tests CASES on 2 ranks, usually
# all of tests/mpi/engine; no Python tests if CASES is "driver". Exits with 77 if there are no sanitizers here.
set -euo pipefail
unset MAKEFLAGS  # ninja cannot use the job server of make -j2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/$1 kind=$2
shift 2
cases=("$@")
if [ $# = 0 ]; then [ "$kind" = thread ] && cases=(memory ring hosts tcp) || cases=(tests/mpi/engine); fi
export PATH=$venv/bin:$PATH
. .ci/ccache.sh
build=build/sanitize-$kind
mkdir -p "$build"

ranks() {
    local number=$1
    shift
    local root=()
    [ "$(id -u)" != 0 ] || root=(--allow-run-as-root)
    mpirun -np "$number" "${root[@]}" --map-by :OVERSUBSCRIBE --bind-to none "$@"
}

fail() {
    grep -hE -A40 "ERROR: |WARNING: ThreadSanitizer|runtime error" "$build"/report* "$build"/log 2>/dev/null | head -n 200 || true
    tail -n 60 "$build/log"
    echo "error: wanted: no report of a sanitizer. Received: see above, and $build/log" >&2
    exit 1
}

flags=(-g -O1 -fno-omit-frame-pointer)
if [ "$kind" = thread ]; then flags+=(-fsanitize=thread -Wno-tsan); else flags+=(-fsanitize=address,undefined); fi
if ! setarch -R true 2>/dev/null || ! c++ "${flags[@]}" -x c++ -o "$build/probe" - <<<'int main() {}' 2>/dev/null; then
    echo "==> SKIPPED: -fsanitize=$kind: needs the sanitizers of the compiler, and setarch -R"
    exit 77
fi
# Not the build of the package: only the engine, without TensorFlow, Python and CUDA.
cat >"$build/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.20)
project(sanitized LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
find_package(MPI REQUIRED COMPONENTS CXX)
find_package(Threads REQUIRED)
file(GLOB sources CONFIGURE_DEPENDS $PWD/csrc/*/*.cc)
list(FILTER sources EXCLUDE REGEX "/faces/|mpi_version|cuda_")
add_library(hvpipe_core SHARED \${sources})
target_include_directories(hvpipe_core PUBLIC $PWD/csrc)
target_compile_options(hvpipe_core PUBLIC ${flags[*]})
target_link_options(hvpipe_core PUBLIC ${flags[*]})
target_link_libraries(hvpipe_core PUBLIC MPI::MPI_CXX Threads::Threads \${CMAKE_DL_LIBS})
add_executable(engine_driver $PWD/tests/support/native/engine_driver.cc)
target_link_libraries(engine_driver hvpipe_core)
END
cmake -S "$build" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE= -DMPI_CXX_COMPILER="$(command -v mpicxx)" >"$build/log"
cmake --build "$build" >>"$build/log" || fail

rm -f "$build"/report*
# MPI must not replace malloc, nor exchange data in ways that the sanitizer cannot follow.
export OMPI_MCA_memory=^patcher UCX_MEM_EVENTS=n OMPI_MCA_osc=^ucx PMIX_MCA_gds=hash
if [ "$kind" = thread ]; then
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 log_path=$PWD/$build/report exitcode=66"
    for mode in "${cases[@]}"; do
        for number in 2 4; do
            for end in "" fail; do
                # -R: with random addresses the sanitizer's own memory may not fit.
                ranks "$number" setarch -R "$build/engine_driver" $mode $end >>"$build/log" 2>&1 || fail
            done
        done
    done
else
    libraries=$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libubsan.so)
    # Python itself leaks, and the engine keeps memory on purpose that MPI may still use after an error.
    export ASAN_OPTIONS="detect_leaks=0 log_path=$PWD/$build/report" UBSAN_OPTIONS="print_stacktrace=1 log_path=$PWD/$build/report"
    for mode in hosts tcp; do
        for end in "" fail; do
            ranks 4 "$build/engine_driver" $mode $end >>"$build/log" 2>&1 || fail
        done
    done
    ! compgen -G "$build/report*" >/dev/null || fail
    [ "${cases[*]}" != driver ] || exit 0
    ranks 2 env LD_PRELOAD="$libraries" LD_LIBRARY_PATH="$PWD/$build" \
        python -u -m pytest -v -x -p no:cacheprovider --color=no "${cases[@]}" >>"$build/log" 2>&1 || fail
    # Only a ring gathers the rows of tables.
    ranks 3 env LD_PRELOAD="$libraries" LD_LIBRARY_PATH="$PWD/$build" HVPIPE_SHARED_MEMORY=0 \
        python -u -m pytest -v -x -p no:cacheprovider --color=no tests/mpi/engine/test_buckets.py >>"$build/log" 2>&1 || fail
fi
! compgen -G "$build/report*" >/dev/null || fail
