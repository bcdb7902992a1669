// Operations on single tokens. Compiled once per instruction set.
#include "token.h"
#include "vec.h"

namespace pagewick {
namespace PW_ISA {

extern const TokenKernels kToken;
const TokenKernels kToken = {};

}  // namespace PW_ISA
}  // namespace pagewick
