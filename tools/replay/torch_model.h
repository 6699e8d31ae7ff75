/* torch_model.h - what PyTorch's own CUDA allocator would reserve for a sequence of allocations, without a
 * device.
 *
 * A model of c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.15) with its default options, in its two
 * modes: segments from cudaMalloc, and expandable segments. Sizes, splitting, best fit, merging, which
 * address is taken, and what is released before it is out of memory are its. Streams have always finished, so
 * events have no part in it.
 */
#ifndef FCDP_TORCH_MODEL_H
#define FCDP_TORCH_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct torch_model torch_model;
typedef struct torch_block torch_block;

/* With `budget_bytes` of device memory. */
torch_model *torch_model_create(bool expandable, size_t budget_bytes);
void torch_model_destroy(torch_model *model);
/* NULL: out of memory. */
torch_block *torch_model_malloc(torch_model *model, size_t bytes, unsigned stream);
void torch_model_free(torch_model *model, torch_block *block);
size_t torch_model_peak_reserved(const torch_model *model);
/* cudaMalloc and cudaFree, failed ones too; or reserve, create, map, set-access, unmap and release, each of
 * one handle (set-access: of one range). */
unsigned long torch_model_driver_calls(const torch_model *model);

#endif
