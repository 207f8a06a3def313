#include "linear.h"

#include <algorithm>

#include "kernels.h"
#include "threads.h"

namespace moestro {

constexpr i64 BLOCKS_A_TASK = 2;  // few, so that two threads end together; more than one, as shaping tiles takes time

// Weights are fetched so many pairs of inputs before their use, into the first cache (3) or the second (2). Each is the
// best of those that were measured with its instructions.
#if defined(__AVX512BF16__)
constexpr int PAIRS_AHEAD = 16, AHEAD_LEVEL = 3;
#else
constexpr int PAIRS_AHEAD = 32, AHEAD_LEVEL = 2;
#endif

// sums[ROWS][BLOCK] of some pairs of inputs, added to those of the pairs before unless these are the first.
template <int ROWS, int VECTORS>
static void multiply_rows(const Input* rows, i64 row_stride, const bf16* block, i64 num_pairs, bool is_first,
                          float* sums) {
    for (int column = 0; column < BLOCK; column += VECTORS * LANES) {
        Floats total[ROWS][VECTORS] = {};
        if (!is_first)
            for (int r = 0; r < ROWS; r++)
                for (int v = 0; v < VECTORS; v++) total[r][v] = load<Floats>(sums + r * BLOCK + column + v * LANES);
        const bf16* weights = block + 2 * column;
        for (i64 pair = 0; pair < num_pairs; pair++, weights += 2 * BLOCK) {
            Pairs weight[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                weight[v] = pairs_of(load<Words>(weights + 2 * LANES * v));
                __builtin_prefetch(weights + 2 * LANES * v + 2 * BLOCK * PAIRS_AHEAD, 0, AHEAD_LEVEL);
            }
            for (int r = 0; r < ROWS; r++) {
                const Pairs input = broadcast_pair(rows + r * row_stride + 2 * pair);
                for (int v = 0; v < VECTORS; v++) total[r][v] = add_products(total[r][v], weight[v], input);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) store(sums + r * BLOCK + column + v * LANES, total[r][v]);
    }
}

static void multiply_some_rows(int num_rows, const Input* rows, i64 row_stride, const bf16* block, i64 num_pairs,
                               bool is_first, float* sums) {
    switch (num_rows) {
        case 1: return multiply_rows<1, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
        case 2: return multiply_rows<2, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
        case 3: return multiply_rows<3, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
#if defined(__AVX512F__)
        case 4: return multiply_rows<4, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
        case 5: return multiply_rows<5, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
#endif
        case HIGH_ROWS:
            return multiply_rows<HIGH_ROWS, COLUMN_VECTORS * REGISTER_ROWS / HIGH_ROWS>(rows, row_stride, block, num_pairs,
                                                                                       is_first, sums);
        default: return multiply_rows<REGISTER_ROWS, COLUMN_VECTORS>(rows, row_stride, block, num_pairs, is_first, sums);
    }
}

// The sums of HIGH_ROWS rows, or of up to REGISTER_ROWS.
static void multiply_in_registers(int num_rows, const bf16* rows, i64 row_stride, const bf16* block, i64 num_inputs,
                                  float* sums) {
#if defined(__AVX512BF16__)
    multiply_some_rows(num_rows, rows, row_stride, block, num_inputs / 2, true, sums);
#else
    constexpr i64 PART = 512, STRIDE = PART + LANES;  // inputs that are widened at once; rows begin in different cache sets
    Input widened[HIGH_ROWS * STRIDE];
    for (i64 k = 0; k < num_inputs; k += PART) {
        const i64 count = std::min(PART, num_inputs - k);
        for (int r = 0; r < num_rows; r++) read_inputs(rows + r * row_stride + k, widened + r * STRIDE, count);
        multiply_some_rows(num_rows, widened, STRIDE, block + k * BLOCK, count / 2, k == 0, sums);
    }
#endif
}

#if defined(__AMX_BF16__)
static void shape_tiles(int num_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 7; tile++) {
        shapes.bytes_of_row[tile] = 64;
        shapes.rows[tile] = static_cast<uint8_t>(tile < 5 ? num_rows : 16);
    }
    _tile_loadconfig(&shapes);
}

static void multiply_in_tiles(const bf16* rows, i64 row_stride, const bf16* block, i64 num_inputs, float* sums) {
    constexpr i64 weight_stride = 2 * BLOCK * sizeof(bf16), sum_stride = BLOCK * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < num_inputs; k += 32) {
        const bf16* weights = block + k * BLOCK;
        for (int line = 0; line < 64; line++) __builtin_prefetch(weights + 32 * BLOCK + 32 * line);
        _tile_loadd(4, rows + k, row_stride * sizeof(bf16));
        _tile_loadd(5, weights, weight_stride);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weights + 32, weight_stride);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, weights + 64, weight_stride);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, weights + 96, weight_stride);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, sum_stride);
    _tile_stored(1, sums + 16, sum_stride);
    _tile_stored(2, sums + 32, sum_stride);
    _tile_stored(3, sums + 48, sum_stride);
}
#endif

Multiplier::~Multiplier() {
#if defined(__AMX_BF16__)
    if (tile_rows_ > 0) _tile_release();
#endif
}

void Multiplier::multiply(int num_rows, const bf16* rows, i64 row_stride, const bf16* block, i64 num_inputs, float* sums) {
#if defined(__AMX_BF16__)
    if (num_inputs % 32 == 0) {
        if (tile_rows_ != num_rows) shape_tiles(tile_rows_ = num_rows);
        return multiply_in_tiles(rows, row_stride, block, num_inputs, sums);
    }
#endif
    while (num_rows > 0) {
        // The last rows in equal parts, because the fewer the rows, the more each costs.
        const int num_parts = (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
        const int count = num_rows >= HIGH_ROWS ? HIGH_ROWS : (num_rows + num_parts - 1) / num_parts;
        multiply_in_registers(count, rows, row_stride, block, num_inputs, sums);
        num_rows -= count, rows += count * row_stride, sums += count * BLOCK;
    }
}

// Write `count` outputs of one row: sums + bias, rounded.
static void finish_row(const float* sums, const bf16* bias, bf16* out, i64 count) {
    float row[BLOCK];
    for (i64 i = 0; i < count; i++) row[i] = bias ? sums[i] + to_float(bias[i]) : sums[i];
    i64 i = 0;
    for (; i + LANES <= count; i += LANES) store_bf16(out + i, load<Floats>(row + i));
    if (i < count) {
        float last[LANES] = {};
        bf16 rounded[LANES];
        memcpy(last, row + i, (count - i) * sizeof(float));
        store_bf16(rounded, load<Floats>(last));
        memcpy(out + i, rounded, (count - i) * sizeof(bf16));
    }
}

}  // namespace moestro

using namespace moestro;

// packed[ceil(outputs / 64) * 64 * inputs] from weight[outputs][inputs].
MOESTRO_KERNEL void moestro_pack(const bf16* weight, bf16* packed, i64 outputs, i64 inputs) {
    const i64 num_blocks = (outputs + BLOCK - 1) / BLOCK;
    parallel(num_blocks, num_blocks * BLOCK * inputs, [&](i64 b) {
        for (i64 k = 0; k < inputs; k += 2)
            for (i64 j = 0; j < BLOCK; j++) {
                const i64 output = b * BLOCK + j;
                uint32_t pair = 0;
                if (output < outputs) memcpy(&pair, weight + output * inputs + k, sizeof pair);
                memcpy(packed + (b * inputs + k) * BLOCK + 2 * j, &pair, sizeof pair);
            }
    });
}

MOESTRO_KERNEL void moestro_unpack(const bf16* packed, bf16* weight, i64 outputs, i64 inputs) {
    for (i64 output = 0; output < outputs; output++) {
        const bf16* first = packed + output / BLOCK * BLOCK * inputs + 2 * (output % BLOCK);
        for (i64 k = 0; k < inputs; k += 2) memcpy(weight + output * inputs + k, first + k * BLOCK, 2 * sizeof(bf16));
    }
}

// out[tokens][heads][outputs] = rows[tokens][heads][inputs] @ weight[heads].T, each head with a packed weight of its own.
// The rows of token t and head h are rows + t * token_stride + h * head_stride.
MOESTRO_KERNEL void moestro_linear_heads(const bf16* rows, i64 token_stride, i64 head_stride, const bf16* packed,
                                         const bf16* bias, bf16* out, i64 num_tokens, i64 num_heads, i64 outputs,
                                         i64 inputs) {
    const i64 num_blocks = (outputs + BLOCK - 1) / BLOCK, num_tiles = (num_tokens + TILE_ROWS - 1) / TILE_ROWS;
    const auto compute = [&](Multiplier& multiplier, i64 head, i64 b, i64 tile) {
        const i64 first = tile * TILE_ROWS, count = std::min<i64>(BLOCK, outputs - b * BLOCK);
        const int size = static_cast<int>(std::min<i64>(TILE_ROWS, num_tokens - first));
        float sums[TILE_ROWS * BLOCK];
        multiplier.multiply(size, rows + first * token_stride + head * head_stride, token_stride,
                            packed + (head * num_blocks + b) * BLOCK * inputs, inputs, sums);
        for (int r = 0; r < size; r++)
            finish_row(sums + r * BLOCK, bias ? bias + b * BLOCK : nullptr,
                       out + ((first + r) * num_heads + head) * outputs + b * BLOCK, count);
    };
    const i64 num_groups = (num_blocks + BLOCKS_A_TASK - 1) / BLOCKS_A_TASK;
    parallel(num_heads * num_groups, num_heads * num_blocks * BLOCK * inputs * num_tokens, [&](i64 task) {
        Multiplier multiplier;
        const i64 head = task / num_groups, begin = task % num_groups * BLOCKS_A_TASK;
        const i64 end = std::min<i64>(num_blocks, begin + BLOCKS_A_TASK);
        for (i64 b = begin; b < end; b++)
            for (i64 tile = 0; tile < num_tiles; tile++) compute(multiplier, head, b, tile);
    });
}

// out[rows][outputs] = rows[rows][inputs] @ weight.T + bias; `bias` may be null.
MOESTRO_KERNEL void moestro_linear(const bf16* rows, const bf16* packed, const bf16* bias, bf16* out, i64 num_rows,
                                   i64 outputs, i64 inputs) {
    moestro_linear_heads(rows, inputs, 0, packed, bias, out, num_rows, 1, outputs, inputs);
}

// The same in float32 with a weight that is not packed: some gates compute in float32.
MOESTRO_KERNEL void moestro_linear_float(const float* rows, const float* weight, const float* bias, float* out,
                                         i64 num_rows, i64 outputs, i64 inputs) {
    parallel(outputs, num_rows * outputs * inputs, [&](i64 output) {
        const float* weights = weight + output * inputs;
        for (i64 r = 0; r < num_rows; r++) {
            const float* row = rows + r * inputs;
            Floats total[4] = {};
            i64 k = 0;
            for (; k + 4 * LANES <= inputs; k += 4 * LANES)
                for (int v = 0; v < 4; v++)
                    total[v] = multiply_add(load<Floats>(row + k + v * LANES), load<Floats>(weights + k + v * LANES),
                                            total[v]);
            float result = sum((total[0] + total[1]) + (total[2] + total[3]));
            for (; k < inputs; k++) result += row[k] * weights[k];
            out[r * outputs + output] = bias ? result + bias[output] : result;
        }
    });
}
