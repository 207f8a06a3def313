// Products of a few rows with a packed bfloat16 weight.
//
// A weight [outputs, inputs] is packed as [outputs / 64][inputs / 2][64][2]: a tile reads memory in one stream, and each
// 32-bit word has two inputs of one output. The last block is filled up with zeros. The number of inputs is even.
#pragma once

#include "vectors.h"

namespace moestro {

constexpr int BLOCK = 64;  // outputs of a block

#if defined(__AMX_BF16__)
constexpr int TILE_ROWS = 16;  // rows for which a block is read once: those of a tile register

// Shapes of the tile registers: 0 to 3 hold sums, 4 rows, 5 and 6 weights.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_of_row[16] = {};
    uint8_t rows[16] = {};
};
#else
constexpr int TILE_ROWS = 48;  // so many that reading a block costs less than its products
#endif

// Multiplies rows with blocks. One lives as long as a loop over blocks, because the tile registers keep their shape.
class Multiplier {
   public:
    ~Multiplier();

    // The sums of up to TILE_ROWS rows for one block: sums[row][BLOCK], each added in ascending order of its inputs. The
    // number of inputs alone decides how, never the number of rows.
    void multiply(int num_rows, const bf16* rows, i64 row_stride, const bf16* block, i64 num_inputs, float* sums);

   private:
    int tile_rows_ = 0;
};

}  // namespace moestro
