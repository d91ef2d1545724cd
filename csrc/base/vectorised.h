// Marks loops that the compiler vectorises for AVX-512, AVX2 and plain x86.
#pragma once

// The compiler emits one version of each loop per target. The loader picks one when the library loads, which
// is before a sanitizer has started.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HVPIPE_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HVPIPE_VECTORISED
#endif

// Element i of the result depends on elements i only, so source and destination may be the same array.
// Without this pragma the compiler checks for overlap at run time and then takes the scalar loop.
#define HVPIPE_ELEMENTWISE _Pragma("GCC ivdep")
