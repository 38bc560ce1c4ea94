// The timeline as people look at it. Both are functions of the operations alone, so the same run
// gives the same bytes.
#pragma once

#include <string>
#include <vector>

#include "virtual_gpu.h"

namespace virtual_gpu {

// Self-contained, 1000 units wide. With an axis of a `least` length rows are low and the legend is
// the same whatever there is, so that several of one length can be stacked.
std::string draw_svg(const std::vector<Operation>&, Picoseconds least = 0);
std::string draw_text(const std::vector<Operation>&);  // 80 columns

int64_t step_number(const Operation&);                 // of its "step N"; -1 outside any

}  // namespace virtual_gpu
