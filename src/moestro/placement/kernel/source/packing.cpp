// Places copies anew: the loop of `placement/packing.py` in C++, by the same sums in the same order.

#include "search.h"

#include <limits>
#include <vector>

// items, item_work, stay_s: [batches, copies]; far_s: [batches, experts + 1, devices] or null; adds, joining_s:
// [batches, joined copies]; room: [devices]; load: [batches, devices], changed; expert: [batches, devices, slots], set.
KERNEL void moestro_pack(const Problem* problem, const int64_t* items, const double* item_work, const double* stay_s,
                         const double* far_s, const uint8_t* adds, const double* joining_s, const int64_t* room,
                         int64_t num_copies, int64_t num_joined, int64_t has_speeds, double* load, int64_t* expert) {
    constexpr double INFINITE = std::numeric_limits<double>::infinity();
    const int64_t num_devices = problem->num_devices, num_slots = problem->num_slots;
    std::vector<int64_t> filled(num_devices), last(num_devices);
    std::vector<double> slowness(num_devices), cost(num_devices);
    for (int64_t device = 0; device < num_devices; ++device) slowness[device] = 1 / problem->speed[device];
    for (int64_t batch = 0; batch < problem->num_batches; ++batch, load += num_devices) {
        filled.assign(num_devices, 0);
        last.assign(num_devices, EMPTY);
        for (int64_t k = 0; k < num_copies; ++k) {
            const int64_t at = batch * num_copies + k, joined = batch * num_joined + k, what = items[at];
            if (what == EMPTY) continue;
            const int64_t base = expert_base(*problem, batch, what);
            const uint8_t* moved = problem->moved + base;
            for (int64_t device = 0; device < num_devices; ++device) {
                cost[device] = (moved[device] ? stay_s[at] : 0.0) + load[device];
            }
            if (far_s != nullptr) {
                for (int64_t device = 0; device < num_devices; ++device) cost[device] += far_s[base + device];
            }
            if (k < num_joined) {
                for (int64_t device = 0; device < num_devices; ++device) {
                    if ((filled[device] > 0) == (adds[joined] != 0)) cost[device] += joining_s[joined];
                }
            }
            if (has_speeds) {
                for (int64_t device = 0; device < num_devices; ++device) cost[device] += item_work[at] * slowness[device];
            }
            if (k > 0 && items[at - 1] == what) {  // copies of an expert follow each other
                for (int64_t device = 0; device < num_devices; ++device) {
                    if (last[device] == what) cost[device] = INFINITE;
                }
            }
            int64_t best = 0;
            double least = INFINITE;
            for (int64_t device = 0; device < num_devices; ++device) {
                if (cost[device] < least) {
                    least = cost[device];
                    best = device;
                }
            }
            if (least == INFINITE) continue;
            expert[(batch * num_devices + best) * num_slots + filled[best]++] = last[best] = what;
            load[best] = filled[best] < room[best] ? load[best] + item_work[at] * slowness[best] : INFINITE;
        }
    }
}
