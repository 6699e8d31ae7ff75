// The c10d backend of the simulated device (collectives.cpp).
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {

// Collectives of tensors on the device, carried by `gloo`, which must be used by nothing else.
c10::intrusive_ptr<c10d::Backend> backend_new(c10::intrusive_ptr<c10d::Backend> gloo);

} // namespace sim
