//go:build amd64 && !purego

#include "textflag.h"

// A tile is a block of C that stays in registers while k runs. One step of k takes one row of B, two vectors wide, and one element of
// A for every row of the tile, broadcast over a vector: two multiply-adds a row. Strides come in elements and are used in bytes.
//
// DI is C, SI and three more registers are rows 0, 3, 6 and 9 of A, BX is B, CX counts k; R8 is the stride of C's rows,
// R9 and R10 are those of A's rows and columns. AX says whether the tile begins with what C holds, or with zero.

#define ARGUMENTS \
	MOVQ c+0(FP), DI; \
	MOVQ a+8(FP), SI; \
	MOVQ b+16(FP), BX; \
	MOVQ k+24(FP), CX; \
	MOVQ ldc+32(FP), R8; \
	SHLQ $2, R8; \
	MOVQ rsa+40(FP), R9; \
	SHLQ $2, R9; \
	MOVQ csa+48(FP), R10; \
	SHLQ $2, R10; \
	MOVBQZX add+56(FP), AX; \
	MOVQ DI, DX; \
	LEAQ (SI)(R9*2), R12; \
	ADDQ R9, R12

// ---- AVX-512: 12 rows of 32 columns in Z8 to Z31 ----

#define ZERO512(c0, c1) \
	VPXORQ c0, c0, c0; \
	VPXORQ c1, c1, c1

#define LOAD512(c0, c1) \
	VMOVUPS (DX), c0; \
	VMOVUPS 64(DX), c1; \
	ADDQ R8, DX

#define ROW512(a, c0, c1) \
	VBROADCASTSS a, Z2; \
	VFMADD231PS Z0, Z2, c0; \
	VFMADD231PS Z1, Z2, c1

#define STORE512(c0, c1) \
	VMOVUPS c0, (DI); \
	VMOVUPS c1, 64(DI); \
	ADDQ R8, DI

// func tileAVX512(c, a, b *float32, k, ldc, rsa, csa int, add bool)
TEXT ·tileAVX512(SB), NOSPLIT, $0-57
	ARGUMENTS
	LEAQ (R12)(R9*2), R13
	ADDQ R9, R13
	LEAQ (R13)(R9*2), R15
	ADDQ R9, R15
	TESTQ AX, AX
	JNZ load
	ZERO512(Z8, Z9)
	ZERO512(Z10, Z11)
	ZERO512(Z12, Z13)
	ZERO512(Z14, Z15)
	ZERO512(Z16, Z17)
	ZERO512(Z18, Z19)
	ZERO512(Z20, Z21)
	ZERO512(Z22, Z23)
	ZERO512(Z24, Z25)
	ZERO512(Z26, Z27)
	ZERO512(Z28, Z29)
	ZERO512(Z30, Z31)
	JMP start
load:
	LOAD512(Z8, Z9)
	LOAD512(Z10, Z11)
	LOAD512(Z12, Z13)
	LOAD512(Z14, Z15)
	LOAD512(Z16, Z17)
	LOAD512(Z18, Z19)
	LOAD512(Z20, Z21)
	LOAD512(Z22, Z23)
	LOAD512(Z24, Z25)
	LOAD512(Z26, Z27)
	LOAD512(Z28, Z29)
	LOAD512(Z30, Z31)
start:
step:
	VMOVUPS (BX), Z0
	VMOVUPS 64(BX), Z1
	ROW512((SI), Z8, Z9)
	ROW512((SI)(R9*1), Z10, Z11)
	ROW512((SI)(R9*2), Z12, Z13)
	ROW512((R12), Z14, Z15)
	ROW512((R12)(R9*1), Z16, Z17)
	ROW512((R12)(R9*2), Z18, Z19)
	ROW512((R13), Z20, Z21)
	ROW512((R13)(R9*1), Z22, Z23)
	ROW512((R13)(R9*2), Z24, Z25)
	ROW512((R15), Z26, Z27)
	ROW512((R15)(R9*1), Z28, Z29)
	ROW512((R15)(R9*2), Z30, Z31)
	ADDQ $128, BX
	ADDQ R10, SI
	ADDQ R10, R12
	ADDQ R10, R13
	ADDQ R10, R15
	DECQ CX
	JNZ step
	STORE512(Z8, Z9)
	STORE512(Z10, Z11)
	STORE512(Z12, Z13)
	STORE512(Z14, Z15)
	STORE512(Z16, Z17)
	STORE512(Z18, Z19)
	STORE512(Z20, Z21)
	STORE512(Z22, Z23)
	STORE512(Z24, Z25)
	STORE512(Z26, Z27)
	STORE512(Z28, Z29)
	STORE512(Z30, Z31)
	VZEROUPPER
	RET

// ---- AVX2: 6 rows of 16 columns in Y0 to Y11 ----

#define ZERO256(c0, c1) \
	VXORPS c0, c0, c0; \
	VXORPS c1, c1, c1

#define LOAD256(c0, c1) \
	VMOVUPS (DX), c0; \
	VMOVUPS 32(DX), c1; \
	ADDQ R8, DX

#define ROW256(a, t, c0, c1) \
	VBROADCASTSS a, t; \
	VFMADD231PS Y12, t, c0; \
	VFMADD231PS Y13, t, c1

#define STORE256(c0, c1) \
	VMOVUPS c0, (DI); \
	VMOVUPS c1, 32(DI); \
	ADDQ R8, DI

// func tileAVX2(c, a, b *float32, k, ldc, rsa, csa int, add bool)
TEXT ·tileAVX2(SB), NOSPLIT, $0-57
	ARGUMENTS
	TESTQ AX, AX
	JNZ load
	ZERO256(Y0, Y1)
	ZERO256(Y2, Y3)
	ZERO256(Y4, Y5)
	ZERO256(Y6, Y7)
	ZERO256(Y8, Y9)
	ZERO256(Y10, Y11)
	JMP start
load:
	LOAD256(Y0, Y1)
	LOAD256(Y2, Y3)
	LOAD256(Y4, Y5)
	LOAD256(Y6, Y7)
	LOAD256(Y8, Y9)
	LOAD256(Y10, Y11)
start:
step:
	VMOVUPS (BX), Y12
	VMOVUPS 32(BX), Y13
	ROW256((SI), Y14, Y0, Y1)
	ROW256((SI)(R9*1), Y15, Y2, Y3)
	ROW256((SI)(R9*2), Y14, Y4, Y5)
	ROW256((R12), Y15, Y6, Y7)
	ROW256((R12)(R9*1), Y14, Y8, Y9)
	ROW256((R12)(R9*2), Y15, Y10, Y11)
	ADDQ $64, BX
	ADDQ R10, SI
	ADDQ R10, R12
	DECQ CX
	JNZ step
	STORE256(Y0, Y1)
	STORE256(Y2, Y3)
	STORE256(Y4, Y5)
	STORE256(Y6, Y7)
	STORE256(Y8, Y9)
	STORE256(Y10, Y11)
	VZEROUPPER
	RET

// func adamAVX2(w, m, v, grad *float32, n int, k *adam)
//
// DI, SI, DX and BX are the weights, their moments and the gradients, CX counts n, a multiple of 8.
TEXT ·adamAVX2(SB), NOSPLIT, $0-48
	MOVQ w+0(FP), DI
	MOVQ m+8(FP), SI
	MOVQ v+16(FP), DX
	MOVQ grad+24(FP), BX
	MOVQ n+32(FP), CX
	MOVQ k+40(FP), AX
	VBROADCASTSS (AX), Y8    // keep1
	VBROADCASTSS 4(AX), Y9   // new1
	VBROADCASTSS 8(AX), Y10  // keep2
	VBROADCASTSS 12(AX), Y11 // new2
	VBROADCASTSS 16(AX), Y12 // rate
	VBROADCASTSS 20(AX), Y13 // scale
	VBROADCASTSS 24(AX), Y14 // eps
step:
	VMOVUPS (BX), Y0
	VMULPS (SI), Y8, Y1
	VMULPS Y0, Y9, Y2
	VADDPS Y2, Y1, Y1
	VMOVUPS Y1, (SI)
	VMULPS Y0, Y0, Y3
	VMULPS (DX), Y10, Y2
	VMULPS Y3, Y11, Y3
	VADDPS Y3, Y2, Y2
	VMOVUPS Y2, (DX)
	VMULPS Y13, Y2, Y2
	VSQRTPS Y2, Y2
	VADDPS Y14, Y2, Y2
	VMULPS Y12, Y1, Y1
	VDIVPS Y2, Y1, Y1
	VMOVUPS (DI), Y3
	VSUBPS Y1, Y3, Y3
	VMOVUPS Y3, (DI)
	ADDQ $32, DI
	ADDQ $32, SI
	ADDQ $32, DX
	ADDQ $32, BX
	SUBQ $8, CX
	JNZ step
	RET
