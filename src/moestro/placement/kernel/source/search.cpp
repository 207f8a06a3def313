// The entry of the placement kernel.

#include "search.h"

extern "C" __attribute__((visibility("default"))) void moestro_search(const Search* search) {
    if (search->counts != nullptr) count_copies(*search->problem, *search->counts);
    if (search->queue != nullptr) place(*search->problem, *search->queue);
    if (search->pairs != nullptr) find_exchanges(*search->problem, *search->packing, *search->pairs);
    if (search->levels != nullptr) level(*search->problem, *search->packing, *search->levels);
    if (search->turns != nullptr) bring_near(*search->problem, *search->packing, *search->turns);
    if (search->steps != nullptr) lower_prices(*search->steps);
}
