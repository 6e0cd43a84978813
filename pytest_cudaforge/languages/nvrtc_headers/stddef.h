/* For NVRTC: size_t is built in; here are its name in std and its neighbours. */
#pragma once
typedef long ptrdiff_t;
namespace std {
using ::ptrdiff_t;
using ::size_t;
using nullptr_t = decltype(nullptr);
}
