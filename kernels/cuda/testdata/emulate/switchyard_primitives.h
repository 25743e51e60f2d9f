// The primitives of kernels/cuda/include/switchyard.cuh for a processor.
#pragma once

namespace switchyard::detail {

inline uint64_t load_relaxed(uint64_t at) { return sw::load_relaxed_sys(at); }
inline uint64_t load_acquire(uint64_t at) { return sw::load_acquire_sys(at); }
inline void store_relaxed(uint64_t at, uint64_t v) { sw::store_relaxed_sys(at, v); }
inline void fence() { sw::fence_acq_rel_sys(); }
inline uint64_t now_ns() { return sw::now_ns(); }

} // namespace switchyard::detail
