// The draws of `cost.gate.PopularityGate`, which NumPy's code makes for all tokens at once. Both are whole numbers, and
// equal.

#include <algorithm>
#include <cstdint>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define ALWAYS_INLINE __attribute__((always_inline)) inline  // into each version of the functions below

// Wider vectors take half the time or less; a processor runs the last version that it has. Clang refuses versions of a
// function that others see.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __has_attribute(target_clones)
#define VERSIONS __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define VERSIONS
#endif

namespace {

constexpr uint64_t kToken = 0xD1342543DE82EF95, kCounter = 0x9E3779B97F4A7C15;
constexpr int64_t kDrawsOfALayer = 1 << 16;
constexpr int64_t kBlock = 32;  // tokens

// The cells (experts of all rows, end to end on a line), and the index by which they are found.
struct Gate {
    int64_t num_domains, num_layers, num_experts, num_chosen;
    const int64_t *length, *start, *end, *row_length, *first_of_piece;
    int64_t piece_shift, domain_shift;
    uint64_t seed;
};

uint64_t mix64(uint64_t x) {  // core.rng
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// Calls `take` with the layer counted from `first_layer`, the token, a number below `num_chosen`, and the expert. In the
// order of these numbers the experts of a token ascend.
//
// A token's draws depend on those before them, so each is made for a block of tokens at once.
template <typename Take>
ALWAYS_INLINE void choose(
    const Gate& gate, const uint64_t* keys, int64_t num, int64_t first_layer, int64_t num_layers, Take take) {
    std::vector<int64_t> chosen(gate.num_chosen * kBlock);
    int64_t first[kBlock], left[kBlock], first_cell[kBlock], point[kBlock], cell[kBlock];
    uint64_t state[kBlock];
    for (int64_t at_layer = 0; at_layer < num_layers; ++at_layer) {
        const int64_t layer = first_layer + at_layer;
        for (int64_t begin = 0; begin < num; begin += kBlock) {
            const int64_t size = std::min(kBlock, num - begin);
            for (int64_t at = 0; at < size; ++at) {
                int64_t row = gate.num_layers > 1 ? layer : 0;
                if (gate.num_domains > 1) {
                    row += gate.num_layers * static_cast<int64_t>(keys[begin + at] >> gate.domain_shift);
                }
                first_cell[at] = row * gate.num_experts;
                first[at] = gate.start[first_cell[at]];
                left[at] = gate.row_length[row];
            }
            for (int64_t drawn = 0; drawn < gate.num_chosen; ++drawn) {
                if (drawn % 2 == 0) {
                    const uint64_t counter = (layer * kDrawsOfALayer + drawn / 2) * kCounter + gate.seed;
                    for (int64_t at = 0; at < size; ++at) state[at] = mix64(keys[begin + at] * kToken + counter);
                }
                for (int64_t at = 0; at < size; ++at) {
                    const int64_t draw = drawn % 2 == 0 ? state[at] >> 32 : state[at] & 0xFFFFFFFF;
                    point[at] = first[at] + (draw * left[at] >> 32);  // among what is left of the row
                }
                for (int64_t i = 0; i < drawn; ++i) {  // in ascending order: step over what was chosen before
                    for (int64_t at = 0; at < size; ++at) {
                        const int64_t other = chosen[i * kBlock + at];
                        point[at] += gate.length[other] & -static_cast<int64_t>(point[at] >= gate.start[other]);
                    }
                }
                for (int64_t at = 0; at < size; ++at) {
                    cell[at] = gate.first_of_piece[point[at] >> gate.piece_shift];
                    while (point[at] >= gate.end[cell[at]]) ++cell[at];
                    left[at] -= gate.length[cell[at]];
                }
                for (int64_t i = 0; i < drawn; ++i) {
                    for (int64_t at = 0; at < size; ++at) {
                        const int64_t other = chosen[i * kBlock + at];
                        chosen[i * kBlock + at] = std::min(other, cell[at]);
                        cell[at] = std::max(other, cell[at]);
                    }
                }
                for (int64_t at = 0; at < size; ++at) chosen[drawn * kBlock + at] = cell[at];
            }
            for (int64_t i = 0; i < gate.num_chosen; ++i) {
                for (int64_t at = 0; at < size; ++at) {
                    take(at_layer, begin + at, i, chosen[i * kBlock + at] - first_cell[at]);
                }
            }
        }
    }
}

}  // namespace

// Writes the experts of each token, int32[tokens, layers, chosen].
EXPORTED VERSIONS void moestro_choose(
    const Gate* gate, const uint64_t* keys, int64_t num, int64_t first_layer, int64_t num_layers, int32_t* found) {
    const int64_t k = gate->num_chosen;
    choose(*gate, keys, num, first_layer, num_layers, [=](int64_t layer, int64_t token, int64_t i, int64_t expert) {
        found[(token * num_layers + layer) * k + i] = static_cast<int32_t>(expert);
    });
}

// Adds the tokens that visit each expert, int64[layers, experts].
EXPORTED VERSIONS void moestro_count(
    const Gate* gate, const uint64_t* keys, int64_t num, int64_t first_layer, int64_t num_layers, int64_t* counts) {
    const int64_t num_experts = gate->num_experts;
    choose(*gate, keys, num, first_layer, num_layers, [=](int64_t layer, int64_t, int64_t, int64_t expert) {
        ++counts[layer * num_experts + expert];
    });
}
