package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// completion is the body of POST /v1/completions. Other fields are refused.
type completion struct {
	Model       string   `json:"model"`
	Prompt      string   `json:"prompt"`
	MaxTokens   *int     `json:"max_tokens"` // a token is a byte
	Temperature *float64 `json:"temperature"`
	Seed        *int64   `json:"seed"`
	Stream      bool     `json:"stream"`
	User        string   `json:"user"`
}

const (
	modelName    = "switchyard-moe"
	maxBody      = 1 << 20
	maxTokens    = 4096 // of one answer
	fewTokens    = 64   // where the client does not say
	temperature  = 0.6  // where the client does not say
	writeTimeout = 30 * time.Second
)

// answer is what comes back: whole, or a part of a stream.
type answer struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Text   string  `json:"text"`
	Index  int     `json:"index"`
	Finish *string `json:"finish_reason"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

// refusal is an error as clients of this API know it.
type refusal struct {
	Error struct {
		Message string `json:"message"`
		Type    string `json:"type"`
	} `json:"error"`
}

func refusalOf(kind string, err error) (r refusal) {
	r.Error.Message, r.Error.Type = err.Error(), kind
	return r
}

// handler is the server's API.
func (f *front) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", f.complete)
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		write(w, http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{"id": modelName, "object": "model"}}})
	})
	mux.HandleFunc("GET /healthz", f.health)
	mux.HandleFunc("GET /metrics", f.metrics)
	mux.HandleFunc("GET /status", f.status)
	mux.Handle("/ranks/", f.page())
	return mux
}

func write(w http.ResponseWriter, code int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(body) // a client that has gone wants no answer
}

// parse reads and checks a request.
func (f *front) parse(w http.ResponseWriter, r *http.Request) (*completion, *request, error) {
	in := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	in.DisallowUnknownFields()
	var c completion
	if err := in.Decode(&c); err != nil {
		return nil, nil, fmt.Errorf("the request is not one of this server: %w", err)
	}
	switch _, err := in.Token(); {
	case err == nil:
		return nil, nil, errors.New("the request is not one of this server: more follows behind its object")
	case !errors.Is(err, io.EOF):
		return nil, nil, fmt.Errorf("the request is not one of this server: behind its object: %w", err)
	}
	q := &request{ctx: r.Context(), left: fewTokens, temperature: temperature, seed: rand.Uint64()}
	if c.MaxTokens != nil {
		q.left = *c.MaxTokens
	}
	if c.Seed != nil {
		q.seed = uint64(*c.Seed)
	}
	t := float64(temperature)
	if c.Temperature != nil {
		t = *c.Temperature
	}
	switch {
	case q.left < 1 || q.left > maxTokens:
		return nil, nil, fmt.Errorf("max_tokens is %d, want 1 to %d", q.left, maxTokens)
	case !(t >= 0 && t <= 2):
		return nil, nil, fmt.Errorf("temperature is %v, want 0 to 2", t)
	case t > 0: // below this numbers overflow
		t = math.Max(t, 0.01)
	}
	q.temperature = float32(t)
	// The model sees a window of bytes, so a short prompt begins after empty lines.
	q.text = []byte(strings.Repeat("\n", max(0, f.window-len(c.Prompt))) + c.Prompt)
	q.next = make(chan byte, q.left)
	return &c, q, nil
}

// complete answers POST /v1/completions. A request ends with its client: the next step is without it.
func (f *front) complete(w http.ResponseWriter, r *http.Request) {
	c, q, err := f.parse(w, r)
	if err != nil {
		code := http.StatusBadRequest
		var long *http.MaxBytesError
		if errors.As(err, &long) {
			code = http.StatusRequestEntityTooLarge
		}
		write(w, code, refusalOf("invalid_request_error", err))
		return
	}
	switch err := f.submit(q); {
	case errors.Is(err, errFull):
		w.Header().Set("Retry-After", "1")
		write(w, http.StatusTooManyRequests, refusalOf("rate_limit_error", err))
		return
	case err != nil:
		write(w, http.StatusServiceUnavailable, refusalOf("server_error", err))
		return
	}
	a := answer{ID: "cmpl-" + strconv.FormatUint(rand.Uint64(), 36), Object: "text_completion", Created: time.Now().Unix(), Model: modelName}
	out := &writer{w: w, stream: c.Stream, answer: a, prompt: len(c.Prompt)}
	out.begin()
	for b := range q.next {
		if out.add(b, len(q.next) > 0) != nil {
			return // the client has gone, and r.Context ends
		}
	}
	out.finish(q.err)
}

// writer writes an answer, whole at its end or in parts.
type writer struct {
	w      http.ResponseWriter
	stream bool
	answer answer
	text   []byte // that is not written yet
	prompt int
	made   int
}

func (o *writer) begin() {
	if o.stream {
		o.w.Header().Set("Content-Type", "text/event-stream")
		o.w.Header().Set("Cache-Control", "no-cache")
		o.w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(o.w).Flush()
	}
}

// add takes a byte. It writes what there is unless more is there already.
func (o *writer) add(b byte, more bool) error {
	o.text = append(o.text, b)
	o.made++
	n := whole(o.text)
	if !o.stream || more || n == 0 {
		return nil
	}
	text := string(o.text[:n])
	o.text = o.text[n:]
	return o.event(o.part(text, nil))
}

// whole is how many bytes do not end within a character.
func whole(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if last := b[len(b)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				return len(b) - n
			}
			break
		}
	}
	return len(b)
}

func (o *writer) part(text string, finish *string) *answer {
	a := o.answer
	a.Choices = []choice{{Text: text, Finish: finish}}
	return &a
}

// event sends one part. A client that does not read is given up after a while; no other waits for it.
func (o *writer) event(body any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	c := http.NewResponseController(o.w)
	_ = c.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := fmt.Fprintf(o.w, "data: %s\n\n", b); err != nil {
		return err
	}
	return c.Flush()
}

// finish writes the end: of a request that failed, why.
func (o *writer) finish(err error) {
	length := "length"
	last := o.part(string(o.text), &length)
	last.Usage = &usage{o.prompt, o.made, o.prompt + o.made}
	switch {
	case errors.Is(err, context.Canceled):
	case err != nil && o.stream:
		_ = o.event(refusalOf("server_error", err))
	case err != nil:
		write(o.w, http.StatusServiceUnavailable, refusalOf("server_error", err))
	case o.stream:
		if o.event(last) == nil {
			_, _ = fmt.Fprint(o.w, "data: [DONE]\n\n")
		}
	default:
		write(o.w, http.StatusOK, last)
	}
}

// condition is the body of /healthz.
type condition struct {
	State   string `json:"state"`
	Ranks   []at   `json:"ranks"`
	Lost    int    `json:"lost"`
	Fresh   int    `json:"fresh"`
	Running int    `json:"running"`
	Waiting int    `json:"waiting"`
	Steps   int    `json:"steps"`
	Tokens  int    `json:"tokens"`
}

type at struct {
	Rank    int   `json:"rank"`
	Host    int   `json:"host,omitempty"` // 0 for that of the front
	Process int   `json:"process,omitempty"`
	Experts []int `json:"experts"`
	// Waited is the seconds that this rank has waited for each rank since they met.
	Waited []float64 `json:"waited_seconds"`
}

// condition is how the server is now.
func (f *front) condition() condition {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := condition{State: f.state, Lost: f.lost, Fresh: f.came, Running: len(f.running), Waiting: len(f.queue), Steps: f.steps, Tokens: f.bytes}
	for _, s := range f.seats {
		waited := []float64{}
		for _, d := range s.waited {
			waited = append(waited, math.Round(1e3*d.Seconds())/1e3)
		}
		c.Ranks = append(c.Ranks, at{s.rank, s.host, s.pid, s.experts, waited})
	}
	return c
}

// health answers whether requests may come: 200, or 503 before the ranks have met, while the server stops, and without ranks.
func (f *front) health(w http.ResponseWriter, _ *http.Request) {
	c, code := f.condition(), http.StatusOK
	if c.State != ready {
		code = http.StatusServiceUnavailable
	}
	write(w, code, c)
}
