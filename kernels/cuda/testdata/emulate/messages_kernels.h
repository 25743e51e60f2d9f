// The kernel of messages with fewer threads than on a GPU, so that a run is short.
#pragma once

#include "../../internal/cuda/layout/messages.h"

#define SW_MESSAGE_THREADS 64
#define SW_FEW_MESSAGE_THREADS 32

#include "messages.cu"
