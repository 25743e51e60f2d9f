// The reductions' own source, for their scenario and that of multicast.
#pragma once

#include "../../internal/cuda/layout/args.h"

// Blocks have fewer threads than on a GPU, so that a run is short.
#define SW_REDUCE_PACKET_THREADS 128
#define SW_REDUCE_THREADS 288

#include "allreduce.cu"
