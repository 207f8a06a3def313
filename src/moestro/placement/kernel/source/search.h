// What all parts of the placement kernel share: the problem, the placement, and the stages of a search.
//
// NumPy's code in `placement/search/` is the definition. Each number is computed by the same operations in the same
// order and precision, and ties go to the same slot, so plans are equal whichever of both makes them.

#pragma once

#include <cstdint>

constexpr int64_t EMPTY = -1;  // a slot that holds no expert

// `PlaceProblem`; shapes as there. row_s may be null.
struct Problem {
    int64_t num_batches, num_experts, num_devices, num_slots;
    const double* speed;
    const uint8_t* room;
    const double* row_s;
    const uint8_t* moved;
    double move_s;
};

// `Packing`, changed in place.
struct Packing {
    int64_t* expert;
    double* share;
    double* work;
    uint8_t* held;
};

// Numbers of copies, [batches, experts], which are set, by `replicas.copy_counts`. token_s, idle and its logarithm have
// the same shape; log_idle is null where no expert is idle.
struct CopyCounts {
    const double *token_s, *idle, *log_idle;
    double expert_s, may_cost;
    int64_t* counts;
    int64_t num_extra;
};

// `QueuedCopies`; shapes as there. far_s may be null. room: [devices]; expert: [batches, devices, slots], set.
struct Queue {
    const int64_t* items;
    const double *item_work, *stay_s, *far_s;
    const uint8_t* adds;
    const double* joining_s;
    const int64_t* room;
    double* load;
    int64_t* expert;
    int64_t num_copies, num_joined, has_speeds;
};

// `search.Rounds`, with the goal's largest and each, [batches], and the problem's token_s, idle and its logarithm,
// [batches, experts]; log_idle is null where no expert is idle.
struct Levels {
    const double *largest, *each, *token_s, *idle, *log_idle;
    double expert_s, slow, least_gain, stalled, ridge, kept;
    int64_t num_rounds, cycle, num_parts, num_share_steps;
};

// Pairs of devices that rotate as in a tournament. cap: [batches].
struct Turns {
    const double* cap;
    double least_gain;
    int64_t num_turns;
};

// Pairs of devices, [pairs], whose best exchange is set. best_slots: [2, pairs].
struct Pairs {
    const int64_t *batch, *one, *other;
    const double* floor;
    int64_t* best_slots;
    double* gain;
    int64_t num_pairs;
};

// `StepPrices`; shapes as there. starts: [starts, layers, devices, slots], of which each layer takes steps from its
// num_best cheapest ones. best: [layers, devices, slots], set.
struct StepPrices {
    int64_t num_layers, num_experts, num_devices, num_slots;
    const double *work_s, *near_s, *sooner_s, *rest_s, *speed;
    const int64_t* node_at;
    const uint8_t *room, *moved;
    double move_s;
    int64_t may_receive;
    const int64_t* starts;
    int64_t* best;
    int64_t num_starts, num_best, num_steps;
    double least_gain;
};

// One call of the kernel. The stages that are not null run in this order.
struct Search {
    const Problem* problem;
    const Packing* packing;
    const CopyCounts* counts;
    const Queue* queue;
    const Pairs* pairs;
    const Levels* levels;
    const Turns* turns;
    const StepPrices* steps;
};

void count_copies(const Problem& problem, const CopyCounts& counts);
void place(const Problem& problem, const Queue& queue);
void find_exchanges(const Problem& problem, const Packing& packing, const Pairs& pairs);
void level(const Problem& problem, const Packing& packing, const Levels& levels);
void bring_near(const Problem& problem, const Packing& packing, const Turns& turns);
void lower_prices(const StepPrices& prices);

// Index of an expert in arrays [batches, experts + 1, devices], whose last expert is EMPTY.
inline int64_t expert_base(const Problem& problem, int64_t batch, int64_t expert) {
    const int64_t row = expert == EMPTY ? problem.num_experts : expert;
    return (batch * (problem.num_experts + 1) + row) * problem.num_devices;
}
