// All kernels of one instruction set. Included by isa_*.cpp only, each compiled with flags of its own.
#pragma once

#include "attention_kernels.h"
#include "dense_kernels.h"
#include "sampling_kernels.h"

namespace {

constexpr cb_engine::KernelSet kKernelSet = {
    {attention_kernels_of<Float32>(), attention_kernels_of<BFloat16>(), attention_kernels_of<Float16>()},
    {dense_kernels_of<Float32>(), dense_kernels_of<BFloat16>(), dense_kernels_of<Float16>()},
    {sampling_kernels_of<Float32>(), sampling_kernels_of<BFloat16>(), sampling_kernels_of<Float16>()},
};

}  // namespace
