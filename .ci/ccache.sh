# Source it before a build: what ccache has compiled is kept for other builds and checkouts of this user.
#
# ccache compares all that a compilation reads, the compiler and the flags. Paths in this folder count as relative, so
# that a fresh clone finds what another one compiled.
if command -v ccache >/dev/null; then
    CMAKE_CXX_COMPILER_LAUNCHER=$(command -v ccache)
    export CMAKE_CXX_COMPILER_LAUNCHER CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
    export CCACHE_DIR=${CCACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/hvpipe/ccache} CCACHE_MAXSIZE=${CCACHE_MAXSIZE:-500M}
fi
