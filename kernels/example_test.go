package kernels_test

import (
	"errors"
	"fmt"

	"github.com/switchyard-moe/switchyard/kernels"
)

// The type and the operator are what a reduction is called with; sizes are in bytes.
func ExampleDType() {
	for _, t := range []kernels.DType{kernels.Uint8, kernels.BFloat16, kernels.Float32} {
		fmt.Println(t, t.Size(), kernels.Sum)
	}
	// Output:
	// uint8 1 sum
	// bfloat16 2 sum
	// float32 4 sum
}

// A caller learns from the error of an exchange which rank has splits that do not fit.
func ExampleSplitsError() {
	err := fmt.Errorf("exchange: %w", &kernels.SplitsError{Rank: 3})
	var splits *kernels.SplitsError
	if errors.As(err, &splits) {
		fmt.Println("rank", splits.Rank)
	}
	// Output: rank 3
}
