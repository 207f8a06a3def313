// What all parts of the placement kernel share: the problem and the placement, as `library.py` hands them over.

#pragma once

#include <cstdint>

#define KERNEL extern "C" __attribute__((visibility("default")))

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

// `StepPrices`; shapes as there.
struct StepPrices {
    int64_t num_layers, num_experts, num_devices, num_slots;
    const double *work_s, *near_s, *sooner_s, *rest_s, *speed;
    const int64_t* node_at;
    const uint8_t *room, *moved;
    double move_s;
    int64_t may_receive;
};

// Index of an expert in arrays [batches, experts + 1, devices], whose last expert is EMPTY.
inline int64_t expert_base(const Problem& problem, int64_t batch, int64_t expert) {
    const int64_t row = expert == EMPTY ? problem.num_experts : expert;
    return (batch * (problem.num_experts + 1) + row) * problem.num_devices;
}
