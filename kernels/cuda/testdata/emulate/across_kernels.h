// The kernels of exchanges, on one host and between hosts, with fewer threads than on a GPU, so that a run is short.
#pragma once

#include "../../internal/cuda/layout/rails.h"

#define SW_SEND_THREADS 96
#define SW_RECV_THREADS 96
#define SW_PACKET_THREADS 64
#define SW_COPY_THREADS 64
#define SW_ACROSS_THREADS 64
#define SW_ACROSS_HOME_THREADS 32

#include "across.cu"
#include "alltoallv.cu"
