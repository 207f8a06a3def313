// Shares of copies: `replicas.share_out` in C++, a batch at a time.

#pragma once

#include "loads.h"
#include "search.h"

#include <cstdint>
#include <vector>

class ShareSearch {
   public:
    ShareSearch(const Problem& problem, const Packing& packing, const Levels& levels);

    // Sets the shares of a batch so that its largest load falls, unless it is at most `target` already.
    void share_out(int64_t batch, double target);

   private:
    // A copy of an expert with several ones.
    struct Copy {
        int64_t device, at, group;  // at: index of its slot; group: number of its expert among those with several copies
        double token_s, idle, log_idle, share, work, weight;
    };

    bool find_copies(int64_t batch);
    double work(const Copy& copy) const;
    double set_loads();
    void step();
    void set_graph(double unit);
    void set_matrix();
    void solve();
    template <typename Use>
    void for_columns(int64_t row, Use use) const;

    const Problem& problem_;
    const Packing& packing_;
    const Levels& levels_;
    const int64_t num_devices_, num_words_;
    const double sum_of_speed_;
    Loads loads_;
    std::vector<Copy> copies_;                       // in the order of their slots
    std::vector<int64_t> num_copies_, group_of_;     // by expert
    std::vector<int64_t> first_, members_;           // first member of each group; copies in the order of groups
    std::vector<double> fixed_, load_, values_;      // by device
    std::vector<double> joined_, own_;               // the graph: [devices, devices], and its diagonal
    std::vector<int64_t> cells_;                     // cells of the graph that are not zero
    std::vector<int64_t> degree_, place_;            // neighbours of a device, and its place in their order
    std::vector<int64_t> counts_;                    // of a sort by counts
    std::vector<float> matrix_, price_;              // in the order of places
    std::vector<uint64_t> used_;                     // bits of the columns of each row that may not be zero
    std::vector<double> mean_, total_;               // by group
};
