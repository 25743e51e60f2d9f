package cuda

import _ "embed"

//go:embed allreduce.fatbin
var allreduceImage []byte

//go:embed alltoallv.fatbin
var alltoallvImage []byte

//go:embed dispatch.fatbin
var dispatchImage []byte

//go:embed multicast.fatbin
var multicastImage []byte

//go:embed manifest.json
var manifestText []byte
