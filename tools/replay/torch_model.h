/* torch_model.h - what PyTorch's own CUDA allocator would reserve for a sequence of allocations, without a device.
 *
 * A model of c10/cuda/CUDACachingAllocator.cpp (torch 2.6 to 2.15) with its default options, in its two modes: segments from cudaMalloc,
 * and expandable segments. Sizes, splitting, best fit, merging and which address is taken are its; a device that never runs out
 * and streams that have always finished are assumed, so events, garbage collection and retries have no part in it.
 */
#ifndef FCDP_TORCH_MODEL_H
#define FCDP_TORCH_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct torch_model torch_model;
typedef struct torch_block torch_block;

torch_model *torch_model_create(bool expandable);
void torch_model_destroy(torch_model *model);
torch_block *torch_model_malloc(torch_model *model, size_t bytes, unsigned stream);
void torch_model_free(torch_model *model, torch_block *block);
size_t torch_model_reserved(const torch_model *model);
/* cudaMalloc; or reserve, create, map and set-access. */
unsigned long torch_model_driver_calls(const torch_model *model);

#endif
