package cuda

import _ "embed"

//go:embed alltoallv.fatbin
var alltoallvImage []byte

//go:embed dispatch.fatbin
var dispatchImage []byte

//go:embed manifest.json
var manifestText []byte
