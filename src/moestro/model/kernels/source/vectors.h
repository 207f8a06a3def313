// Vectors of float32 and bfloat16, written once for the instruction sets for which the kernels are compiled.
//
// The compiler's vector extensions give arithmetic. What they lack (fused products, the dot product of bfloat16 pairs,
// conversion to bfloat16) has one form for each instruction set below. No operation here depends on how many rows a
// kernel computes at once, and contraction is off (`-ffp-contract=off`), so that a row's result never does either.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moestro {

using i64 = int64_t;
using bf16 = uint16_t;

#if defined(__AVX512F__)
constexpr int LANES = 16;           // floats of a vector
constexpr int COLUMN_VECTORS = 4;   // vectors of output columns that a tile of a product computes at once
constexpr int REGISTER_ROWS = 6;    // rows of such a tile: with its columns, what the registers hold
#if defined(__AVX512BF16__)
constexpr int HIGH_ROWS = REGISTER_ROWS;
#else
constexpr int HIGH_ROWS = 12;       // rows of a tile of half the columns, which widens less for a product
#endif
constexpr int TILE_QUERIES = 6;     // the same for the sum of values in attention
#else
#if defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int COLUMN_VECTORS = 2;
constexpr int REGISTER_ROWS = 4;
constexpr int HIGH_ROWS = REGISTER_ROWS;
constexpr int TILE_QUERIES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));  // each two bfloat16, the first in the low half
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <typename Vector>
static inline Vector load(const void* from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <typename Vector>
static inline void store(void* to, Vector value) {
    memcpy(to, &value, sizeof value);
}

static inline Floats broadcast(float value) { return value - Floats{}; }

static inline float to_float(bf16 value) {
    uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Compilers convert 16 halves in two parts, unless an intrinsic is used.
static inline Words lengthen(Halves halves) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#else
    return __builtin_convertvector(halves, Words);
#endif
}

static inline Halves shorten(Words words) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)words);
#else
    return __builtin_convertvector(words, Halves);
#endif
}

static inline Floats load_bf16(const bf16* from) { return (Floats)(lengthen(load<Halves>(from)) << 16); }

static inline void widen(const bf16* from, float* to, i64 count) {
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, load_bf16(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
}

// a * b + c, rounded once where the instruction set can, else twice.
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Both bfloat16 of each word, as `add_products` takes them, and what a row is made of whose pairs are broadcast. Without
// a dot product of bfloat16 a row is widened to floats first, once for all columns, because a load broadcasts at no cost.
#if defined(__AVX512BF16__)
using Pairs = Words;
using Input = bf16;

static inline Pairs pairs_of(Words words) { return words; }

static inline Pairs broadcast_pair(const Input* from) {
    uint32_t word;
    memcpy(&word, from, sizeof word);
    return word | Words{};
}

static inline void read_inputs(const bf16* from, Input* to, i64 count) { memcpy(to, from, count * sizeof(bf16)); }
#else
struct Pairs {
    Floats first, second;
};
using Input = float;

static inline Pairs pairs_of(Words words) { return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)}; }

static inline Pairs broadcast_pair(const Input* from) { return {broadcast(from[0]), broadcast(from[1])}; }

static inline void read_inputs(const bf16* from, Input* to, i64 count) { widen(from, to, count); }
#endif

// total + the products of both bfloat16 of each word.
static inline Floats add_products(Floats total, Pairs a, Pairs b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return multiply_add(a.second, b.second, multiply_add(a.first, b.first, total));
#endif
}

// Round to the nearest bfloat16, ties to even.
static inline void store_bf16(bf16* to, Floats value) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh((__m512)value));
#else
    const Words bits = (Words)value;
    const Words is_nan = (Words)(value != value);
    const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    store(to, shorten(((is_nan & 0x7fc00000u) | (~is_nan & rounded)) >> 16));
#endif
}

static inline Floats maximum(Floats a, Floats b) {
    const Ints is_less = a < b;
    return (Floats)((is_less & (Ints)b) | (~is_less & (Ints)a));
}

// The sum and the largest of a vector's floats, by halves: one fixed tree.
static inline float sum(Floats value) {
    float part[LANES];
    store(part, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

static inline float largest(Floats value) {
    float part[LANES];
    store(part, value);
    float found = part[0];
    for (int i = 1; i < LANES; i++) found = part[i] > found ? part[i] : found;
    return found;
}

// e to the power of x, to about 2e-7 relative; x below -87 gives about 1e-38, above 88 the value at 88.
static inline Floats exponential(Floats x) {
    x = maximum(x, broadcast(-87.0f));
    x = -maximum(-x, broadcast(-88.0f));
    const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats whole = (multiply_add(x, broadcast(1.44269504f), magic)) - magic;
    // x - whole * ln 2, with ln 2 in two parts.
    Floats rest = multiply_add(whole, broadcast(-0.693359375f), x);
    rest = multiply_add(whole, broadcast(2.12194440e-4f), rest);
    Floats value = broadcast(1.0f / 5040.0f);
    const float factors[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    for (float factor : factors) value = multiply_add(value, rest, broadcast(factor));
    const Words power = (Words)(__builtin_convertvector(whole, Ints) + 127) << 23;
    return value * (Floats)power;
}

static inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

}  // namespace moestro

#define MOESTRO_KERNEL extern "C" __attribute__((visibility("default")))
