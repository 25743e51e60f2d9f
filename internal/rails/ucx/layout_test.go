//go:build cgo && linux

package ucx

import (
	"os/exec"
	"strings"
	"testing"
)

// The structures of swucx.h are those of UCX's header, as far as they go, and at least as long.
func TestLayout(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs cc")
	}
	compile := func(source string) (string, error) {
		cmd := exec.Command(cc, "-fsyntax-only", "-x", "c", "-I.", "-")
		cmd.Stdin = strings.NewReader("#include <ucp/api/ucp.h>\n" + source)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if _, err := compile(""); err != nil {
		t.Skip("needs UCX's header (Debian: libucx-dev)")
	}
	source := "#include \"swucx.h\"\n"
	for _, s := range []struct {
		ours, theirs string
		fields       []string // ours and theirs in turn
	}{
		{"swu_params", "ucp_params_t", []string{"mask", "field_mask", "features", "features"}},
		{"swu_worker_params", "ucp_worker_params_t", []string{"mask", "field_mask", "thread_mode", "thread_mode"}},
		{"swu_ep_params", "ucp_ep_params_t", []string{"mask", "field_mask", "address", "address", "err_mode", "err_mode",
			"err_handler", "err_handler.cb", "err_arg", "err_handler.arg"}},
		{"swu_am_handler", "ucp_am_handler_param_t", []string{"mask", "field_mask", "id", "id", "flags", "flags", "cb", "cb", "arg", "arg"}},
		{"swu_request_param", "ucp_request_param_t", []string{"mask", "op_attr_mask", "flags", "flags", "request", "request", "cb", "cb",
			"datatype", "datatype", "user_data", "user_data"}},
	} {
		source += "_Static_assert(sizeof(" + s.ours + ") >= sizeof(" + s.theirs + "), \"" + s.ours + "\");\n"
		for i := 0; i < len(s.fields); i += 2 {
			source += "_Static_assert(offsetof(" + s.ours + ", " + s.fields[i] + ") == offsetof(" + s.theirs + ", " + s.fields[i+1] + "), \"" +
				s.ours + "." + s.fields[i] + "\");\n"
		}
	}
	for name, value := range map[string]string{
		"UCS_OK": "0", "UCS_INPROGRESS": "1", "UCS_THREAD_MODE_SERIALIZED": "1", "UCP_FEATURE_WAKEUP": "1 << 4", "UCP_FEATURE_AM": "1 << 6",
		"UCP_ERR_HANDLING_MODE_PEER": "1", "UCP_OP_ATTR_FIELD_CALLBACK": "1 << 1", "UCP_OP_ATTR_FIELD_USER_DATA": "1 << 2",
		"UCP_OP_ATTR_FIELD_FLAGS": "1 << 4", "UCP_EP_CLOSE_FLAG_FORCE": "1 << 0", "UCP_AM_RECV_ATTR_FLAG_RNDV": "1 << 17", "UCS_ERR_LAST": "-100",
		"UCS_ERR_UNREACHABLE": "-6", "UCS_ERR_NO_DEVICE": "-14",
	} {
		source += "_Static_assert(" + name + " == (" + value + "), \"" + name + "\");\n"
	}
	if out, err := compile(source); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
