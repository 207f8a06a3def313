// How many copies each expert gets: `replicas.copy_counts` in C++.

#include "idle.h"
#include "loads.h"
#include "search.h"

#include <algorithm>
#include <cstdint>
#include <vector>

void count_copies(const Problem& problem, const CopyCounts& counts) {
    struct Expert {
        double per_copy;
        int64_t number;

        bool operator<(const Expert& other) const {  // the first one of equal ones is the largest
            return per_copy < other.per_copy || (per_copy == other.per_copy && number > other.number);
        }
    };
    const int64_t num_experts = problem.num_experts, num_extra = counts.num_extra;
    const bool are_read = counts.expert_s > 0;
    const double speed = pairwise_sum(problem.speed, problem.num_devices);
    const double fastest = *std::max_element(problem.speed, problem.speed + problem.num_devices);
    std::vector<Expert> heap(num_experts);
    std::vector<double> per_copy(num_experts), bounds(num_extra + 1);
    std::vector<int64_t> given(num_extra);
    for (int64_t batch = 0; batch < problem.num_batches; ++batch) {
        const double *token_s = counts.token_s + batch * num_experts, *idle = counts.idle + batch * num_experts;
        const double* log_idle = counts.log_idle == nullptr ? idle : counts.log_idle + batch * num_experts;
        int64_t* of_expert = counts.counts + batch * num_experts;
        std::fill(of_expert, of_expert + num_experts, int64_t(1));
        for (int64_t what = 0; what < num_experts; ++what) {
            per_copy[what] = token_s[what];
            if (are_read) per_copy[what] += counts.expert_s * (1 - idle[what]);
            heap[what] = {per_copy[what], what};
        }
        double total = pairwise_sum(per_copy.data(), num_experts);
        std::make_heap(heap.begin(), heap.end());
        for (int64_t i = 0;; ++i) {
            Expert& most = heap.front();
            bounds[i] = std::max(total / speed, most.per_copy / fastest);
            if (i == num_extra) break;
            const int64_t what = given[i] = most.number, now = ++of_expert[what];
            double work = token_s[what] / double(now);
            if (are_read) {
                work += counts.expert_s * (1 - idle_part(idle[what], log_idle[what], 1.0 / double(now)));
                total -= most.per_copy * double(now - 1);
                total += work * double(now);
            }
            std::pop_heap(heap.begin(), heap.end());
            heap.back().per_copy = now < problem.num_devices ? work : -1.0;
            std::push_heap(heap.begin(), heap.end());
        }
        if (!are_read) continue;
        // The most copies that cost no more than the best number may.
        const double allowed = *std::min_element(bounds.begin(), bounds.end()) * (1 + counts.may_cost);
        for (int64_t i = num_extra; i > 0 && !(bounds[i] <= allowed); --i) --of_expert[given[i - 1]];
    }
}
