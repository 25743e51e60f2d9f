// The part of torch's stable C ABI that operators use: of torch/csrc/stable/c/shim.h and
// torch/csrc/inductor/aoti_torch/c/shim.h, as they are from torch 2.11 on. The library is built without torch and not
// linked with it: it looks functions up in the torch that is loaded. A test compares the types with torch's headers.
#ifndef SWITCHYARD_TORCH_H
#define SWITCHYARD_TORCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Version 2.11 as torch counts versions of its ABI.
#define TORCH_ABI 0x020b000000000000

typedef struct AtenTensorOpaque *torch_tensor;
typedef struct StableListOpaque *torch_list;
typedef struct TorchLibraryOpaque *torch_library;

// Takes inputs off a stack, which it owns, and puts outputs there, which are the caller's.
typedef void torch_kernel(uint64_t *stack, uint64_t inputs, uint64_t outputs);

// Functions with an int32_t return 0 where they succeed, those without arguments a number of torch's.
#define TORCH_FUNCTIONS(F) \
	F(int32_t, aoti_torch_device_type_cpu, (void)) \
	F(int32_t, aoti_torch_device_type_cuda, (void)) \
	F(int32_t, aoti_torch_layout_strided, (void)) \
	F(int32_t, aoti_torch_dtype_float32, (void)) \
	F(int32_t, aoti_torch_dtype_bfloat16, (void)) \
	F(int32_t, aoti_torch_dtype_float16, (void)) \
	F(int32_t, aoti_torch_dtype_float8_e4m3fn, (void)) \
	F(int32_t, aoti_torch_dtype_int32, (void)) \
	F(int32_t, aoti_torch_dtype_int64, (void)) \
	F(int32_t, aoti_torch_dtype_uint8, (void)) \
	F(int32_t, aoti_torch_dtype_complex32, (void)) \
	F(int32_t, aoti_torch_dtype_complex64, (void)) \
	F(int32_t, aoti_torch_dtype_complex128, (void)) \
	F(size_t, aoti_torch_dtype_element_size, (int32_t dtype)) \
	F(int32_t, aoti_torch_get_layout, (torch_tensor, int32_t *layout)) \
	F(int32_t, aoti_torch_is_contiguous, (torch_tensor, bool *contiguous)) \
	F(int32_t, aoti_torch_get_device_type, (torch_tensor, int32_t *type)) \
	F(int32_t, aoti_torch_get_device_index, (torch_tensor, int32_t *index)) \
	F(int32_t, aoti_torch_get_dtype, (torch_tensor, int32_t *dtype)) \
	F(int32_t, aoti_torch_get_dim, (torch_tensor, int64_t *dim)) \
	F(int32_t, aoti_torch_get_sizes, (torch_tensor, int64_t **sizes)) \
	F(int32_t, aoti_torch_get_data_ptr, (torch_tensor, void **data)) \
	F(int32_t, aoti_torch_delete_tensor_object, (torch_tensor)) \
	F(int32_t, aoti_torch_new_uninitialized_tensor, (torch_tensor *)) \
	F(int32_t, aoti_torch_empty_strided, \
	  (int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device, int32_t index, \
	   torch_tensor *)) \
	F(int32_t, aoti_torch__reinterpret_tensor, \
	  (torch_tensor, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset, torch_tensor *)) \
	F(int32_t, torch_from_blob, \
	  (void *data, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t dtype, \
	   int32_t device, int32_t index, torch_tensor *, int32_t layout, const uint8_t *metadata, int64_t bytes, \
	   void (*deleter)(void *data, void *context), void *context)) \
	F(int32_t, torch_new_list_reserve_size, (size_t size, torch_list *)) \
	F(int32_t, torch_list_size, (torch_list, size_t *size)) \
	F(int32_t, torch_list_get_item, (torch_list, size_t index, uint64_t *item)) \
	F(int32_t, torch_list_push_back, (torch_list, uint64_t item)) \
	F(int32_t, torch_delete_list, (torch_list)) \
	F(int32_t, aoti_torch_library_init_fragment, \
	  (const char *space, const char *file, uint32_t line, torch_library *)) \
	F(int32_t, aoti_torch_library_init_impl, \
	  (const char *space, const char *key, const char *file, uint32_t line, torch_library *)) \
	F(int32_t, aoti_torch_library_def, (torch_library, const char *schema)) \
	F(int32_t, torch_library_impl, (torch_library, const char *name, torch_kernel *, uint64_t version))

// Of libtorch_cuda.so, where torch has one.
#define TORCH_GPU_FUNCTIONS(F) F(int32_t, aoti_torch_get_current_cuda_stream, (int32_t index, void **stream))

#endif
