// The site's search runs in a worker, which browsers refuse to pages of the file system.
// There, a hidden frame does the worker's part: the script in it sees the same functions.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow, script = frame.contentDocument.createElement("script");
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => { script.onload = resolve; });
      this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
      script.src = url;
      frame.contentDocument.head.append(script);
    }
    postMessage(data) { this.ready.then(() => this.deliver(data)); }
  };
}
