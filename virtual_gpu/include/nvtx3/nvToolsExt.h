// The virtual GPU's <nvtx3/nvToolsExt.h>: ranges name the operations in its timeline.
#pragma once

// Both return the depth of the range, from 0; a pop without a push returns a negative number.
int nvtxRangePushA(const char* message);
int nvtxRangePop();
