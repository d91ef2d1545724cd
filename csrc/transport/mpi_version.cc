// Prints the version of the MPI library that programs use at run time. CMake runs this once, at configure
// time.
#include <mpi.h>

#include <cstdio>

int main() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return 1;
  std::printf("%s\n", text);
  return 0;
}
