// Blocks of the kernels of MoE dispatch have fewer threads here than on a GPU, so that a run is short.
#pragma once

#include "../../internal/cuda/layout/args.h"

#define SW_DISPATCH_THREADS 128
#define SW_DISPATCH_COUNTS_THREADS 32
#define SW_DISPATCH_FEW_THREADS 128
#define SW_DISPATCH_FEW_PUBLISHER 3
#define SW_DISPATCH_FEW_SUM_THREADS 96
#define SW_DISPATCH_SUM_THREADS 64
#define SW_DISPATCH_PASS_THREADS 64
#define SW_DISPATCH_SUM_PASS_THREADS 96
#define SW_DISPATCH_PASS_PART 512

#define SW_RESULT_THREADS 64
#define SW_TAKE_RESULT_THREADS 64
#define SW_TOKEN_WEIGHTS_THREADS 64
