// Search runs in a worker, and browsers start none for pages opened from disk. There an iframe does
// the same. (The theme would load a script for that from the network.)
class IframeWorker extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.appendChild(this.frame);
    const inside = this.frame.contentWindow;
    this.listen = (event) => {
      if (event.source !== inside) return;
      const message = new MessageEvent("message", { data: event.data });
      this.dispatchEvent(message);
      if (this.onmessage) this.onmessage(message);
    };
    window.addEventListener("message", this.listen);
    this.ready = new Promise((resolve) => (this.frame.onload = resolve));
    inside.document.open();
    inside.document.write(
      "<!DOCTYPE html><script>" +
        'self.postMessage = (data) => parent.postMessage(data, "*");' +
        "self.importScripts = (...urls) => Promise.all(urls.map((url) => new Promise((done) => {" +
        'const script = document.createElement("script");' +
        "script.src = url; script.onload = done; document.body.appendChild(script); })));" +
        `</script><body><script src="${url}"></script></body>`,
    );
    inside.document.close();
  }

  postMessage(data) {
    const inside = this.frame.contentWindow;
    this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
  }

  terminate() {
    window.removeEventListener("message", this.listen);
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = IframeWorker;
