// What is done to each token by itself: activations, rotation, storing of keys and values.
#pragma once

#include "kernels.h"

namespace pagewick {

struct TokenKernels {};

}  // namespace pagewick
