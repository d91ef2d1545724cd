// Compares the declarations of a C library with hvpipe's own.
#pragma once

#include <type_traits>

// Pointers and enumerations are interchangeable; all other types must be the same.
template <typename Type>
using Passed =
    std::conditional_t<std::is_pointer_v<Type>, void*, std::conditional_t<std::is_enum_v<Type>, int, Type>>;
template <typename Ours, typename Theirs>
constexpr bool kSame = std::is_same_v<Passed<Ours>, Passed<Theirs>>;

template <typename... Ours, typename Result, typename... Theirs>
constexpr bool SameParameters(void (*)(Ours...), Result (*)(Theirs...)) {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return (kSame<Ours, Theirs> && ...);
  }
}
