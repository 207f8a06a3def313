// Routed experts with a gated SiLU: down(silu(gate(x)) * up(x)), gate and up in one weight, gate first.
//
// An answer is rounded to bfloat16 before it is weighted, as it is where another process computes it, and a token's
// answers are added in ascending expert id in float32. So the sum is the same bit for bit wherever experts are computed.

#include <algorithm>
#include <vector>

#include "linear.h"
#include "threads.h"

namespace moestro {

// Some rows of one expert.
struct ExpertTile {
    i64 slot;
    i64 first;  // place of its first row
    int size;
};

struct ExpertWeights {
    const bf16* const* up;    // for each slot, packed [2 * inner, hidden]
    const bf16* const* down;  // for each slot, packed [hidden, inner]
    i64 hidden, inner;
};

// Write the answers to a tile's rows, which lie end to end. `answer_at(r)`: address of the answer to row r.
template <typename AnswerAt>
static void answer_tile(const ExpertWeights& weights, const ExpertTile& tile, const bf16* rows, AnswerAt answer_at) {
    const i64 hidden = weights.hidden, inner = weights.inner;
    const i64 up_blocks = (2 * inner + BLOCK - 1) / BLOCK, down_blocks = (hidden + BLOCK - 1) / BLOCK;
    static thread_local std::vector<float> wide;
    static thread_local std::vector<bf16> narrow;
    wide.resize(TILE_ROWS * up_blocks * BLOCK);
    narrow.resize(TILE_ROWS * inner);
    Multiplier multiplier;
    float sums[TILE_ROWS * BLOCK];
    for (i64 b = 0; b < up_blocks; b++) {
        multiplier.multiply(tile.size, rows, hidden, weights.up[tile.slot] + b * BLOCK * hidden, hidden, sums);
        for (int r = 0; r < tile.size; r++)
            memcpy(&wide[(r * up_blocks + b) * BLOCK], sums + r * BLOCK, sizeof(float) * BLOCK);
    }
    for (int r = 0; r < tile.size; r++) {
        const float* gate = &wide[r * up_blocks * BLOCK];
        for (i64 j = 0; j < inner; j += LANES)
            store_bf16(&narrow[r * inner + j], silu(load<Floats>(gate + j)) * load<Floats>(gate + inner + j));
    }
    for (i64 b = 0; b < down_blocks; b++) {
        multiplier.multiply(tile.size, narrow.data(), inner, weights.down[tile.slot] + b * BLOCK * inner, inner, sums);
        const i64 count = std::min<i64>(BLOCK, hidden - b * BLOCK);
        for (int r = 0; r < tile.size; r++)
            for (i64 j = 0; j < count; j += LANES)
                store_bf16(answer_at(r) + b * BLOCK + j, load<Floats>(sums + r * BLOCK + j));
    }
}

// Split `count` rows of a slot from place `first` on into tiles.
static void add_tiles(std::vector<ExpertTile>& tiles, i64 slot, i64 first, i64 count) {
    for (i64 done = 0; done < count; done += TILE_ROWS)
        tiles.push_back({slot, first + done, static_cast<int>(std::min<i64>(TILE_ROWS, count - done))});
}

}  // namespace moestro

using namespace moestro;

// answers[rows][hidden], not weighted, of the experts in `slots`, whose `counts` rows lie end to end.
// `hidden` and `inner` are multiples of 16.
MOESTRO_KERNEL void moestro_expert_answers(const bf16* rows, const i64* slots, const i64* counts, i64 num_batches,
                                           const bf16* const* up, const bf16* const* down, bf16* answers, i64 hidden,
                                           i64 inner) {
    std::vector<ExpertTile> tiles;
    i64 first = 0;
    for (i64 i = 0; i < num_batches; first += counts[i], i++) add_tiles(tiles, slots[i], first, counts[i]);
    const ExpertWeights weights{up, down, hidden, inner};
    parallel(static_cast<i64>(tiles.size()), first * hidden * inner, [&](i64 i) {
        const i64 place = tiles[i].first;
        answer_tile(weights, tiles[i], rows + place * hidden, [&](int r) { return answers + (place + r) * hidden; });
    });
}

// answers[tokens][chosen][hidden], not weighted, of at most `max_experts` experts with tokens, from `begin` on;
// counts[experts] grows by the tokens of each. Returns the expert behind the last one computed, and the number of
// experts if none with tokens is left.
MOESTRO_KERNEL i64 moestro_chosen_answers(const bf16* tokens, const i64* topk_ids, const bf16* const* up,
                                          const bf16* const* down, bf16* answers, i64* counts, i64 begin,
                                          i64 max_experts, i64 num_tokens, i64 num_chosen, i64 num_experts, i64 hidden,
                                          i64 inner) {
    const i64 num_pairs = num_tokens * num_chosen;
    static thread_local std::vector<i64> first, pair_at;
    static thread_local std::vector<ExpertTile> tiles;
    first.assign(num_experts + 1, 0);
    for (i64 pair = 0; pair < num_pairs; pair++) first[topk_ids[pair] + 1]++;
    tiles.clear();
    i64 end = begin, num_rows = 0;
    for (i64 left = max_experts; end < num_experts && (left > 0 || first[end + 1] == 0); end++) {
        const i64 count = first[end + 1];
        left -= count > 0;
        add_tiles(tiles, end, num_rows, count);
        counts[end] += count;
        first[end + 1] = num_rows;  // from here on, the place of an expert's next row
        num_rows += count;
    }
    pair_at.resize(num_rows);
    for (i64 pair = 0; pair < num_pairs; pair++)
        if (const i64 expert = topk_ids[pair]; expert >= begin && expert < end) pair_at[first[expert + 1]++] = pair;
    // Other threads must see this thread's buffers.
    const i64* pairs = pair_at.data();
    const ExpertTile* tile_list = tiles.data();
    const ExpertWeights weights{up, down, hidden, inner};
    parallel(static_cast<i64>(tiles.size()), num_rows * hidden * inner, [&](i64 i) {
        const ExpertTile tile = tile_list[i];
        static thread_local std::vector<bf16> rows;
        rows.resize(TILE_ROWS * hidden);
        for (int r = 0; r < tile.size; r++)
            memcpy(&rows[r * hidden], tokens + pairs[tile.first + r] / num_chosen * hidden, hidden * sizeof(bf16));
        answer_tile(weights, tile, rows.data(), [&](int r) { return answers + pairs[tile.first + r] * hidden; });
    });
    return end;
}

// out[tokens][hidden], the weighted sums of answers[tokens][chosen][hidden] in ascending expert id.
MOESTRO_KERNEL void moestro_add_answers(const bf16* answers, const i64* topk_ids, const float* topk_weights, bf16* out,
                                        i64 num_tokens, i64 num_chosen, i64 hidden) {
    parallel(num_tokens, num_tokens * num_chosen * hidden, [&](i64 token) {
        static thread_local std::vector<i64> order;  // the token's choices by expert
        order.resize(num_chosen);
        for (i64 c = 0; c < num_chosen; c++) order[c] = token * num_chosen + c;
        std::sort(order.begin(), order.end(), [&](i64 a, i64 b) { return topk_ids[a] < topk_ids[b]; });
        for (i64 j = 0; j < hidden; j += LANES) {
            Floats total = load_bf16(answers + order[0] * hidden + j) * broadcast(topk_weights[order[0]]);
            for (i64 c = 1; c < num_chosen; c++)
                total += load_bf16(answers + order[c] * hidden + j) * broadcast(topk_weights[order[c]]);
            store_bf16(out + token * hidden + j, total);
        }
    });
}

// out[tokens][hidden], the weighted sums of each token's experts; counts[experts] grows by the tokens of each.
MOESTRO_KERNEL void moestro_routed_experts(const bf16* tokens, const i64* topk_ids, const float* topk_weights,
                                           const bf16* const* up, const bf16* const* down, bf16* out, i64* counts,
                                           i64 num_tokens, i64 num_chosen, i64 num_experts, i64 hidden, i64 inner) {
    static thread_local std::vector<bf16> answers;
    answers.resize(num_tokens * num_chosen * hidden);
    moestro_chosen_answers(tokens, topk_ids, up, down, answers.data(), counts, 0, num_experts, num_tokens, num_chosen,
                           num_experts, hidden, inner);
    moestro_add_answers(answers.data(), topk_ids, topk_weights, out, num_tokens, num_chosen, hidden);
}
