// Loads of devices, summed up as NumPy does.

#pragma once

#include "search.h"

#include <algorithm>
#include <cstdint>
#include <vector>

// The sum as NumPy adds up the last axis of an array: eight sums in turn, and halves of what is long. Inlined, its calls
// of itself take compilers seconds.
__attribute__((noinline)) inline double pairwise_sum(const double* values, int64_t count) {
    constexpr int64_t UNROLLED = 8, BLOCK = 128;
    if (count < UNROLLED) {
        double sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += values[i];
        return sum;
    }
    if (count > BLOCK) {
        const int64_t half = count / 2 - count / 2 % UNROLLED;
        return pairwise_sum(values, half) + pairwise_sum(values + half, count - half);
    }
    double r[UNROLLED];
    std::copy(values, values + UNROLLED, r);
    int64_t i = UNROLLED;
    for (; i < count - count % UNROLLED; i += UNROLLED) {
        for (int64_t k = 0; k < UNROLLED; ++k) r[k] += values[i + k];
    }
    double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    for (; i < count; ++i) sum += values[i];
    return sum;
}

// Loads of a batch's devices, and the devices from the least load to the largest.
struct Loads {
    std::vector<double> load;
    std::vector<int64_t> order;

    void of(const Problem& problem, const Packing& packing, int64_t batch) {
        const int64_t num_devices = problem.num_devices;
        load.resize(num_devices);
        order.resize(num_devices);
        for (int64_t device = 0; device < num_devices; ++device) {
            const double* work = packing.work + (batch * num_devices + device) * problem.num_slots;
            load[device] = pairwise_sum(work, problem.num_slots) / problem.speed[device];
            order[device] = device;
        }
    }

    double largest() const { return *std::max_element(load.begin(), load.end()); }

    void sort() {
        std::sort(order.begin(), order.end(), [this](int64_t one, int64_t other) {
            return load[one] < load[other] || (load[one] == load[other] && one < other);
        });
    }
};
