package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// outcome is what the clients of a load have seen.
type outcome struct {
	mu          sync.Mutex
	tokens      int
	first, last []time.Duration // from the request to its first byte, and to its end
	refused     int             // with 429
	failures    []string        // what else came instead of an answer
}

// load sends requests from several clients at a time until ctx ends, and tells how it went. Requests that are under way then are finished.
func load(ctx context.Context, url string, clients, tokens int, out io.Writer) error {
	o, begin := new(outcome), time.Now()
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	defer transport.CloseIdleConnections()
	c := &http.Client{Transport: transport}
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				o.one(ctx, c, url, i<<20+n, tokens)
			}
		})
	}
	all.Wait()
	return o.tell(out, clients, time.Since(begin))
}

var prompts = []string{"func main() {\n", "// Package ", "\tif err != nil {\n", "import (\n", "type Reader struct {\n"}

// one sends a request and reads the stream of its answer.
func (o *outcome) one(ctx context.Context, c *http.Client, url string, seed, tokens int) {
	body, _ := json.Marshal(map[string]any{"prompt": prompts[seed%len(prompts)], "max_tokens": tokens, "seed": seed, "stream": true})
	begin := time.Now()
	r, err := c.Post(url+"/v1/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		o.failed(err)
		pause(ctx)
		return
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(r.Body, 1<<10))
		if r.StatusCode == http.StatusTooManyRequests {
			o.mu.Lock()
			o.refused++
			o.mu.Unlock()
		} else {
			o.failed(fmt.Errorf("%s: %s", r.Status, bytes.TrimSpace(text)))
		}
		pause(ctx)
		return
	}
	first, got, err := readStream(r.Body)
	switch {
	case err != nil:
		o.failed(err)
	case got != tokens:
		o.failed(fmt.Errorf("an answer of %d tokens, want %d", got, tokens))
	default:
		o.mu.Lock()
		defer o.mu.Unlock()
		o.tokens += got
		o.first, o.last = append(o.first, first.Sub(begin)), append(o.last, time.Since(begin))
	}
}

// readStream returns when the first part came, and how many tokens the answer has.
func readStream(body io.Reader) (first time.Time, tokens int, err error) {
	lines, done := bufio.NewScanner(body), false
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if first.IsZero() {
			first = time.Now()
		}
		if done = data == "[DONE]"; done {
			continue
		}
		var part struct {
			answer
			refusal
		}
		switch err := json.Unmarshal([]byte(data), &part); {
		case err != nil:
			return first, tokens, err
		case part.Error.Message != "":
			return first, tokens, errors.New(part.Error.Message)
		case part.Usage != nil:
			tokens = part.Usage.Completion
		}
	}
	if err = lines.Err(); err == nil && !done {
		err = errors.New("the answer ended before its end")
	}
	return first, tokens, err
}

// pause is as long as a refused client waits.
func pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(100 * time.Millisecond):
	}
}

func (o *outcome) failed(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failures = append(o.failures, err.Error())
}

// tell prints the figures. Answers that failed are an error.
func (o *outcome) tell(out io.Writer, clients int, took time.Duration) error {
	fmt.Fprintf(out, "%d clients, %.1f s: %d answers, %d tokens, %.0f tokens a second\n",
		clients, took.Seconds(), len(o.last), o.tokens, float64(o.tokens)/took.Seconds())
	for _, of := range []struct {
		what string
		took []time.Duration
	}{{"first token", o.first}, {"whole answer", o.last}} {
		slices.Sort(of.took)
		if n := len(of.took); n > 0 {
			fmt.Fprintf(out, "%-13s p50 %s, p99 %s\n", of.what, shown(of.took[n/2]), shown(of.took[n*99/100]))
		}
	}
	fmt.Fprintf(out, "refused %d, failed %d\n", o.refused, len(o.failures))
	if n := len(o.failures); n > 0 {
		return fmt.Errorf("%d requests failed, the first: %s", n, o.failures[0])
	}
	if len(o.last) == 0 {
		return errors.New("no request was answered")
	}
	return nil
}

func shown(d time.Duration) string { return fmt.Sprintf("%.1f ms", 1e3*d.Seconds()) }
