// The kernel of plans with fewer threads than on a GPU, and few steps at a time, so that a run is short.
#pragma once

#include "../../internal/cuda/layout/plans.h"

#define SW_PLAN_THREADS 64
#define SW_PLAN_STEPS 4

#include "plans.cu"
