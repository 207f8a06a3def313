// Places copies anew: the loop of `placement/search/packing.py` in C++, by the same sums in the same order.

#include "search.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int64_t LANES = 2, CHAINS = 4;  // numbers that are compared at once, and minima that do not wait for each other
typedef double Doubles __attribute__((vector_size(8 * LANES)));

// Costs of devices, padded with infinite ones.
class Costs {
   public:
    explicit Costs(int64_t num_devices)
        : costs_((num_devices + LANES * CHAINS - 1) / (LANES * CHAINS) * CHAINS, Doubles{} + INFINITE) {}

    double* data() { return reinterpret_cast<double*>(costs_.data()); }

    double least() const {
        Doubles least[CHAINS];
        std::copy(costs_.begin(), costs_.begin() + CHAINS, least);
        for (size_t i = CHAINS; i < costs_.size(); i += CHAINS) {
            for (int64_t chain = 0; chain < CHAINS; ++chain) {
                const Doubles each = costs_[i + chain];
                least[chain] = each < least[chain] ? each : least[chain];
            }
        }
        double found = INFINITE;
        for (const Doubles& each : least) found = std::min(found, std::min(each[0], each[1]));
        return found;
    }

   private:
    std::vector<Doubles> costs_;
};

}  // namespace

void place(const Problem& problem, const Queue& queue) {
    const int64_t num_devices = problem.num_devices, num_slots = problem.num_slots;
    std::vector<int64_t> filled(num_devices), last(num_devices);
    std::vector<double> slowness(num_devices);
    Costs costs(num_devices);
    double* cost = costs.data();
    for (int64_t device = 0; device < num_devices; ++device) slowness[device] = 1 / problem.speed[device];
    for (int64_t batch = 0; batch < problem.num_batches; ++batch) {
        double* load = queue.load + batch * num_devices;
        filled.assign(num_devices, 0);
        last.assign(num_devices, EMPTY);
        for (int64_t k = 0; k < queue.num_copies; ++k) {
            const int64_t at = batch * queue.num_copies + k, joined = batch * queue.num_joined + k, what = queue.items[at];
            if (what == EMPTY) continue;
            const int64_t base = expert_base(problem, batch, what);
            const double stay_s = queue.stay_s[at], work = queue.item_work[at];
            for (int64_t device = 0; device < num_devices; ++device) cost[device] = stay_s + load[device];
            // Few devices hold the expert already.
            const uint8_t *first = problem.moved + base, *end = first + num_devices, *held = first;
            while ((held = static_cast<const uint8_t*>(std::memchr(held, 0, end - held))) != nullptr) {
                cost[held - first] = load[held - first];
                ++held;
            }
            if (queue.far_s != nullptr) {
                for (int64_t device = 0; device < num_devices; ++device) cost[device] += queue.far_s[base + device];
            }
            if (k < queue.num_joined) {
                for (int64_t device = 0; device < num_devices; ++device) {
                    if ((filled[device] > 0) == (queue.adds[joined] != 0)) cost[device] += queue.joining_s[joined];
                }
            }
            if (queue.has_speeds) {
                for (int64_t device = 0; device < num_devices; ++device) cost[device] += work * slowness[device];
            }
            if (k > 0 && queue.items[at - 1] == what) {  // copies of an expert follow each other
                for (int64_t device = 0; device < num_devices; ++device) {
                    if (last[device] == what) cost[device] = INFINITE;
                }
            }
            const double least = costs.least();
            if (least == INFINITE) continue;
            const int64_t best = std::find(cost, cost + num_devices, least) - cost;  // the first of equal ones
            queue.expert[(batch * num_devices + best) * num_slots + filled[best]++] = last[best] = what;
            load[best] = filled[best] < queue.room[best] ? load[best] + work * slowness[best] : INFINITE;
        }
    }
}
