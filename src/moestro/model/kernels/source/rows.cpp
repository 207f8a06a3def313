// Operations on one row at a time: norms, rotary positions and sigmoids. Intermediate results are rounded to bfloat16
// where transformers rounds them.

#include <algorithm>

#include "kernels.h"
#include "threads.h"

namespace moestro {

int num_threads = 1;

static inline Floats rounded(Floats value) {
    bf16 narrow[LANES];
    store_bf16(narrow, value);
    return load_bf16(narrow);
}

static void normalize_row(const bf16* row, const bf16* weight, bf16* out, i64 size, float epsilon) {
    Floats total = {};
    for (i64 j = 0; j < size; j += LANES) {
        const Floats value = load_bf16(row + j);
        total = multiply_add(value, value, total);
    }
    const Floats scale = broadcast(1.0f / std::sqrt(sum(total) / size + epsilon));
    for (i64 j = 0; j < size; j += LANES)
        store_bf16(out + j, load_bf16(weight + j) * rounded(load_bf16(row + j) * scale));
}

// The first half of a head's entries is paired with the second: (a, b) becomes (a cos - b sin, b cos + a sin).
static void rotate_head(const bf16* head, const bf16* cos, const bf16* sin, bf16* out, i64 half) {
    for (i64 j = 0; j < half; j += LANES) {
        const Floats a = load_bf16(head + j), b = load_bf16(head + half + j);
        store_bf16(out + j, rounded(a * load_bf16(cos + j)) + rounded(-b * load_bf16(sin + j)));
        store_bf16(out + half + j, rounded(b * load_bf16(cos + half + j)) + rounded(a * load_bf16(sin + half + j)));
    }
}

}  // namespace moestro

using namespace moestro;

// The number of threads of all kernels.
MOESTRO_KERNEL void moestro_set_threads(i64 count) { num_threads = static_cast<int>(count); }

// out[rows][size] = weight * rows / sqrt(mean(rows^2) + epsilon); `size` is a multiple of 16.
MOESTRO_KERNEL void moestro_rms_norm(const bf16* rows, const bf16* weight, bf16* out, i64 num_rows, i64 size,
                                     float epsilon) {
    parallel(num_rows, num_rows * size, [&](i64 r) { normalize_row(rows + r * size, weight, out + r * size, size, epsilon); });
}

// out[count] = 1 / (1 + exp(-from)) in float32. The end of the array is computed as its beginning.
MOESTRO_KERNEL void moestro_sigmoid(const float* from, float* out, i64 count) {
    for (i64 i = 0; i < count; i += LANES) {
        const i64 bytes = std::min<i64>(LANES, count - i) * sizeof(float);
        Floats value = {};
        memcpy(&value, from + i, bytes);
        value = 1.0f / (1.0f + exponential(-value));
        memcpy(out + i, &value, bytes);
    }
}

// out[tokens][heads][size], each head rotated by its token's cos and sin [tokens][size]; `size` is a multiple of 32.
MOESTRO_KERNEL void moestro_rotate(const bf16* heads, i64 token_stride, i64 head_stride, const bf16* cos, const bf16* sin,
                                   bf16* out, i64 num_tokens, i64 num_heads, i64 size) {
    parallel(num_tokens, num_tokens * num_heads * size, [&](i64 token) {
        for (i64 head = 0; head < num_heads; head++)
            rotate_head(heads + token * token_stride + head * head_stride, cos + token * size, sin + token * size,
                        out + (token * num_heads + head) * size, size / 2);
    });
}
